"""A hub on loopback: what huggingface_hub and Rackless ask of one, counted, with faults on demand.

It searches with pages, lists trees, and sends files with ranges, hashes and licences.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

REVISION = "c" * 40
PAGE_ITEMS = 3
"""Number of hits on one page of a search."""
_KINDS = {"models": "model", "datasets": "dataset"}


@dataclass
class SiteRepo:
    """A model or data set of the site; its files by branch, of which `main` is the newest."""

    name: str
    kind: str = "model"
    files: Mapping[str, bytes] = field(default_factory=dict)
    branches: dict[str, tuple[str, Mapping[str, bytes]]] = field(default_factory=dict)
    """Commit and files of other branches."""
    is_gated: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)
    """More of its entry in a search."""

    def find(self, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Return commit and files of a branch or commit."""
        if revision in ("main", REVISION):
            return REVISION, self.files
        found = [one for key, one in self.branches.items() if revision in (key, one[0])]
        return found[0] if found else None


@dataclass(frozen=True)
class Fault:
    """Answer in place of the right one, to requests whose path contains `part`."""

    part: str
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


class ModelSite:
    """Serves repositories, one gated model at first.

    `files` names each file that was sent, with the token that asked.
    """

    def __init__(self, model: str, files: Mapping[str, bytes], tokens: tuple[str, ...]) -> None:
        self.repos = [SiteRepo(model, files=files, is_gated=True)]
        self.tokens = tokens
        """Those that may read what is gated."""
        self.refused: list[str] = []
        """Tokens that it has turned away, empty where there was none."""
        self.files: list[tuple[str, str]] = []
        self.asked: list[tuple[str, str]] = []
        """Path and token of each request."""
        self.ranges: list[str] = []
        self.faults: list[Fault] = []
        self.altered: set[str] = set()
        """Files that are sent with other content than is listed."""
        self.before: Callable[[str, str], bool] = lambda name, token: True
        """Gets a file's name and the token before it is sent; False: half of it is sent."""
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def add(self, name: str, **values: Any) -> SiteRepo:
        """Serve another repository, too."""
        self.repos.append(SiteRepo(name, **values))
        return self.repos[-1]

    def use(self, home: Path, token: str) -> None:
        """Give a user, whose home it is, a token of this hub."""
        kept = home / ".cache" / "huggingface" / "token"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(token)

    def use_here(self, patch: pytest.MonkeyPatch, cache: Path, token: str = "") -> None:
        """Let the hub's tools in this process use this hub, a cache and a token."""
        from huggingface_hub import constants

        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, self.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", self.url)
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("HF_HUB_CACHE", str(cache))
        patch.setenv("HF_ENDPOINT", self.url)
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv("HF_TOKEN", token)

    def make_shell(self, path: Path) -> str:
        """Write a login shell whose programs use this hub; return its path."""
        path.write_text(f'#!/bin/sh\nexport HF_ENDPOINT={self.url}\nexec /bin/sh "$@"\n')
        path.chmod(0o700)
        return str(path)


def _describe(name: str, data: bytes) -> dict[str, Any]:
    git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    said: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": git}
    if name.endswith((".safetensors", ".parquet")):
        digest = hashlib.sha256(data).hexdigest()
        said["lfs"] = {"oid": digest, "sha256": digest, "size": len(data), "pointerSize": 130}
    return said


def _handler(site: ModelSite) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            site.asked.append((self.path, token))
            fault = next((one for one in site.faults if one.part in self.path), None)
            if fault is not None:
                self._head(fault.status, len(fault.body), **fault.headers)
                if self.command == "GET":
                    self.wfile.write(fault.body)
                return
            place = unquote(urlsplit(self.path).path).strip("/")
            is_api, place = place.startswith("api/"), place.removeprefix("api/")
            word, _, rest = place.partition("/")
            if is_api and not rest:
                self._search(_KINDS[word], {k: v[0] for k, v in parse_qs(self._query()).items()})
                return
            kind = _KINDS.get(word, "model")
            named = rest if word in _KINDS else place
            repo = next(
                (one for one in site.repos if one.kind == kind and _leads(one.name, named)), None
            )
            if repo is None:
                self._head(404, 0, **{"X-Error-Code": "RepoNotFound"})
            elif repo.is_gated and token not in site.tokens:
                site.refused.append(token)
                self._head(403, 0, **{"X-Error-Code": "GatedRepo"})
            else:
                self._tell(repo, named.removeprefix(repo.name).strip("/"), token)

        def _query(self) -> str:
            return urlsplit(self.path).query

        def _search(self, kind: str, asked: Mapping[str, str]) -> None:
            words = asked.get("search", "").lower()
            hits = [one for one in site.repos if one.kind == kind and words in one.name.lower()]
            start = int(asked.get("cursor", "0"))
            stop = start + min(int(asked["limit"]), PAGE_ITEMS)
            more = {}
            if stop < len(hits):
                query = re.sub(r"&cursor=\d+", "", self._query())
                path = urlsplit(self.path).path
                more["Link"] = f'<{site.url}{path}?{query}&cursor={stop}>; rel="next"'
            page = [
                {"id": one.name, "gated": "manual" if one.is_gated else False, **one.about}
                for one in hits[start:stop]
            ]
            self._say(page, **more)

        def _tell(self, repo: SiteRepo, rest: str, token: str) -> None:
            verb, _, place = rest.partition("/")
            revision, path = "main", ""
            if verb == "revision":
                revision = place
            elif verb in ("tree", "resolve"):
                known = ("main", REVISION, *repo.branches, *(c for c, _ in repo.branches.values()))
                revision = next((one for one in known if _leads(one, place)), place)
                path = place.removeprefix(revision).strip("/")
            found = repo.find(revision)
            if found is None:
                self._head(404, 0, **{"X-Error-Code": "RevisionNotFound"})
                return
            commit, contents = found
            described = {name: _describe(name, data) for name, data in contents.items()}
            if verb == "tree":
                self._say(list(described.values()))
            elif verb == "resolve" and path in contents:
                self._send(commit, path, contents[path], described[path], token)
            elif verb == "resolve":
                self._head(404, 0, **{"X-Error-Code": "EntryNotFound"})
            else:
                siblings = [
                    {"rfilename": name, "size": one["size"], "blobId": one["oid"]}
                    | ({"lfs": one["lfs"]} if "lfs" in one else {})
                    for name, one in described.items()
                ]
                self._say({"id": repo.name, "sha": commit, "siblings": siblings, **repo.about})

        def _send(
            self, commit: str, name: str, data: bytes, about: dict[str, Any], token: str
        ) -> None:
            etag = about.get("lfs", {}).get("sha256") or about["oid"]
            if name in site.altered:
                data = bytes(len(data))
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            start = int(wanted[1]) if wanted else 0
            more = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
            if wanted:
                site.ranges.append(name)
                more["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._head(206 if wanted else 200, len(data) - start, **more)
            if self.command == "GET":
                site.files.append((name, token))
                half = max(len(data) // 2, start)
                self.wfile.write(data[start:half])
                if site.before(name, token):
                    with contextlib.suppress(OSError):
                        self.wfile.write(data[half:])

        def _say(self, value: object, **headers: str) -> None:
            data = json.dumps(value).encode()
            self._head(200, len(data), **{"Content-Type": "application/json", **headers})
            if self.command == "GET":
                self.wfile.write(data)

        def _head(self, status: int, size_bytes: int, **headers: str) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(size_bytes), **headers}.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            return

    return Handler


def _leads(start: str, place: str) -> bool:
    return place == start or place.startswith(f"{start}/")


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
