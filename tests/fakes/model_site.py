"""A hub that models are downloaded from: what huggingface_hub asks of one, on loopback, counted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REVISION = "c" * 40


class ModelSite:
    """Serves one gated model; `files` names each file that was sent, with the token that asked."""

    def __init__(self, model: str, files: Mapping[str, bytes], tokens: tuple[str, ...]) -> None:
        self.model = model
        self.contents = files
        self.tokens = tokens
        """Those that may read the model."""
        self.refused: list[str] = []
        """Tokens that it has turned away, empty where there was none."""
        self.files: list[tuple[str, str]] = []
        self.before: Callable[[str, str], bool] = lambda name, token: True
        """Gets a file's name and the token before it is sent; False: half of it is sent."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def use(self, home: Path, token: str) -> None:
        """Give a user, whose home it is, a token of this hub."""
        kept = home / ".cache" / "huggingface" / "token"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(token)

    def make_shell(self, path: Path) -> str:
        """Write a login shell whose programs use this hub; return its path."""
        path.write_text(f'#!/bin/sh\nexport HF_ENDPOINT={self.url}\nexec /bin/sh "$@"\n')
        path.chmod(0o700)
        return str(path)


def _describe(name: str, data: bytes) -> dict[str, object]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    said: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": git}
    if name.endswith(".safetensors"):
        digest = hashlib.sha256(data).hexdigest()
        said["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
    return said


def _handler(site: ModelSite) -> type[BaseHTTPRequestHandler]:
    described = {name: _describe(name, data) for name, data in site.contents.items()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            place = self.path.partition("?")[0]
            if token not in site.tokens:
                site.refused.append(token)
                self._head(403, 0, **{"X-Error-Code": "GatedRepo"})
            elif f"/tree/{REVISION}" in place:
                self._say(list(described.values()))
            elif place.startswith(f"/api/models/{site.model}"):
                siblings = [
                    {"rfilename": name, "size": one["size"], "blobId": one["oid"]}
                    | ({"lfs": one["lfs"]} if "lfs" in one else {})
                    for name, one in described.items()
                ]
                self._say({"id": site.model, "sha": REVISION, "siblings": siblings})
            else:
                self._send(place.partition(f"/resolve/{REVISION}/")[2], token)

        def _send(self, name: str, token: str) -> None:
            data, lfs = site.contents[name], described[name].get("lfs")
            etag = lfs["sha256"] if isinstance(lfs, dict) else described[name]["oid"]
            self._head(200, len(data), ETag=f'"{etag}"', **{"X-Repo-Commit": REVISION})
            if self.command == "GET":
                site.files.append((name, token))
                self.wfile.write(data[: len(data) // 2])
                if site.before(name, token):
                    with contextlib.suppress(OSError):
                        self.wfile.write(data[len(data) // 2 :])

        def _say(self, value: object) -> None:
            data = json.dumps(value).encode()
            self._head(200, len(data), **{"Content-Type": "application/json"})
            self.wfile.write(data)

        def _head(self, status: int, size_bytes: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(size_bytes), **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    return Handler


@contextlib.contextmanager
def model_site(
    model: str, files: Mapping[str, bytes], tokens: tuple[str, ...]
) -> Iterator[ModelSite]:
    """Serve a model inside the block."""
    site = ModelSite(model, files, tokens)
    thread = threading.Thread(target=site.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield site
    finally:
        site.server.shutdown()
        thread.join()
        site.server.server_close()
