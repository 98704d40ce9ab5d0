"""A package index on loopback that counts what it serves, and can break off or be slow."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from packaging.utils import canonicalize_name


class PackageSite:
    """Serves the wheels of a folder by PEP 691; `files` names each file that was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pages: list[str] = []
        self.files: list[str] = []
        self.sent_bytes = 0
        self.break_after: int | None = None
        """Bytes after which each answer with a file breaks off; None: none does."""
        self.may_break: Callable[[], bool] = lambda: True
        """Asked again and again before an answer breaks off, until it returns True."""
        self.before_page: Callable[[], object] = lambda: None
        """Called before a page is sent."""
        self.pause_s = 0.0
        """Time between two blocks of a file, in seconds."""
        self.with_html = False
        self.with_metadata = False
        """Whether METADATA of a wheel can be had beside it (PEP 658)."""
        self.uploaded: dict[str, str] = {}
        """Moments of uploads in ISO 8601, by the name of the file."""
        self.yanked: set[str] = set()
        """Names of files that are yanked."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/simple"

    @property
    def num_requests(self) -> int:
        return len(self.pages) + len(self.files)

    def named(self, name: str) -> list[Path]:
        files = sorted(self.folder.glob("*.whl"))
        return [file for file in files if canonicalize_name(file.name.split("-")[0]) == name]

    def __enter__(self) -> PackageSite:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(site: PackageSite) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, name = self.path.strip("/").split("/")[-2:]
            if kind == "simple":
                self._page(name)
            else:
                self._file(site.folder / name)

        def _page(self, name: str) -> None:
            site.pages.append(name)
            site.before_page()
            found = site.named(name)
            if not found:
                self.send_error(404)
                return
            hashes = {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in found}
            if site.with_html:
                links = (
                    f'<a href="/file/{f.name}#sha256={h}"'
                    f"{' data-yanked' * (f.name in site.yanked)}>x</a>"
                    for f, h in hashes.items()
                )
                self._answer("text/html", "".join(links).encode())
                return
            files = [
                {
                    "filename": file.name,
                    "url": f"../../file/{file.name}",
                    "hashes": {"sha256": sha256},
                    "size": file.stat().st_size,
                    "yanked": "broken" if file.name in site.yanked else False,
                    "core-metadata": site.with_metadata,
                }
                | ({"upload-time": site.uploaded[file.name]} if file.name in site.uploaded else {})
                for file, sha256 in hashes.items()
            ]
            text = json.dumps({"files": files}).encode()
            self._answer("application/vnd.pypi.simple.v1+json", text)

        def _answer(self, kind: str, data: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _metadata(self, wheel: Path) -> None:
            if not site.with_metadata:
                self.send_error(404)
                return
            with zipfile.ZipFile(wheel) as opened:
                (name,) = (one for one in opened.namelist() if one.endswith("/METADATA"))
                self._answer("text/plain", opened.read(name))

        def _file(self, file: Path) -> None:
            if file.suffix == ".metadata":
                self._metadata(file.with_suffix(""))
                return
            site.files.append(file.name)
            data, asked = file.read_bytes(), self.headers.get("Range", "")
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(len(data) - start))
            self.end_headers()
            end = len(data) if site.break_after is None else start + site.break_after
            with contextlib.suppress(OSError):
                for at in range(start, min(end, len(data)), 1 << 16):
                    block = data[at : min(at + (1 << 16), end)]
                    self.wfile.write(block)
                    site.sent_bytes += len(block)
                    time.sleep(site.pause_s)
                while end < len(data) and not site.may_break():
                    time.sleep(0.01)

        def do_HEAD(self) -> None:
            file = site.folder / self.path.rpartition("/")[2]
            self.send_response(200)
            self.send_header("Content-Length", str(file.stat().st_size))
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    return Handler


def put_pip(folder: Path) -> Path:
    """Copy the pip that Python itself brings into a folder of wheels; return the file."""
    (found,) = (
        file
        for file in importlib.resources.files("ensurepip").joinpath("_bundled").iterdir()
        if file.name.startswith("pip-")
    )
    with importlib.resources.as_file(found) as file:
        return Path(shutil.copy(file, folder))


def use_site(home: Path, url: str) -> None:
    """Have the pip of a user, whose home it is, use an index."""
    config = home / ".config" / "pip" / "pip.conf"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(f"[global]\nindex-url = {url}\n")


@contextlib.contextmanager
def package_site(folder: Path) -> Iterator[PackageSite]:
    """Serve the wheels of a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with PackageSite(folder) as site:
        yield site
