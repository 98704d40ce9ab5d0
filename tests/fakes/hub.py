"""A hub for models on this PC: as much of the Hugging Face hub's HTTP as a push and a look need."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "x" * 34


@dataclass
class FakeHub:
    address: str = ""
    status: int = 200
    """Status of every answer; 200: normal operation."""
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)

    def answer(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        """Return the JSON answer of one request."""
        parts = path.partition("?")[0].strip("/").split("/")
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path == "/api/whoami-v2":
            return {"name": "anna", "auth": {"accessToken": {"displayName": "pc", "role": "write"}}}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.models.setdefault(name, {})
            self.private[name] = asked.get("private") or asked.get("visibility") == "private"
            return {"url": f"{self.address}/{name}", "name": name}
        name = "/".join(parts[2:4])
        if "preupload" in parts:
            files = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            return {"files": [{"path": one["path"], **modes} for one in files]}
        if "commit" in parts:
            for line in body.splitlines():
                said = json.loads(line)
                if said["key"] == "file":
                    content = base64.b64decode(said["value"]["content"])
                    self.models[name][said["value"]["path"]] = content
            return {"commitUrl": f"{self.address}/{name}/commit/1", "commitOid": "1" * 40}
        files = [{"rfilename": n, "size": len(d)} for n, d in self.models[name].items()]
        return {"id": name, "siblings": files, "sha": "1" * 40}


@contextlib.contextmanager
def open_hub() -> Iterator[FakeHub]:
    """Serve a hub for as long as the block lasts."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            status = hub.status if known else 401
            said = hub.answer(self.command, self.path, body) if status == 200 else {"error": "no"}
            data = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = handle_request  # noqa: N815 - the names that the server looks for

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()
