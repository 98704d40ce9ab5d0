"""Package indexes: the files that they have of a package (PEP 503 and 691), and their contents.

The indexes are those configured for this PC's pip, else for uv: a mirror, a folder of wheels, a
certificate. No answer of an index is trusted: the hash of a lock decides.
"""

from __future__ import annotations

import base64
import configparser
import contextlib
import hashlib
import http.client
import json
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urldefrag, urljoin, urlsplit, urlunsplit

PYPI = "https://pypi.org/simple"
TIMEOUT_S = 20.0
"""Maximum silence of an index or a download, in seconds."""
_MAX_PAGE_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 18
_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class IndexUnreachable(Exception):
    """Raised when an index does not answer, or not as an index; the message names its host."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{_host(where)}: {reason}")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSettings:
    """Places to search for packages."""

    indexes: tuple[str, ...] = (PYPI,)
    links: tuple[str, ...] = ()
    """Folders and pages with files, in addition to the indexes."""
    certificates: str = ""
    """File with certificate authorities; empty: the system's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedFile:
    """File that an index offers."""

    name: str
    url: str
    sha256: str | None = None
    """Hash that the index claims; None: not given."""
    size_bytes: int | None = None


def read_index_settings(
    environ: Mapping[str, str], home: Path, more: str | None = None
) -> IndexSettings:
    """Return the indexes configured for a user's pip, else for uv, else PyPI.

    Args:
        environ: environment variables, such as PIP_INDEX_URL.
        home: home folder of the user.
        more: index to ask last, unless pip is configured to ask none; None: no other.
    """
    given = _read_pip_files(environ, home)
    given |= {
        name: value
        for name in ("index-url", "extra-index-url", "find-links", "no-index", "cert")
        if (value := environ.get("PIP_" + name.upper().replace("-", "_"))) is not None
    }
    main = given.get("index-url") or environ.get("UV_DEFAULT_INDEX") or environ.get("UV_INDEX_URL")
    indexes = [main or PYPI, *given.get("extra-index-url", "").split(), *([more] if more else [])]
    is_off = given.get("no-index", "").lower() in ("1", "true", "yes", "on")
    return IndexSettings(
        indexes=() if is_off else tuple(dict.fromkeys(indexes)),
        links=tuple(given.get("find-links", "").split()),
        certificates=given.get("cert", ""),
    )


def _read_pip_files(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    config = environ.get("XDG_CONFIG_HOME") or str(home / ".config")
    files = ["/etc/xdg/pip/pip.conf", "/etc/pip.conf", str(home / ".pip" / "pip.conf")]
    files += [f"{config}/pip/pip.conf", environ.get("PIP_CONFIG_FILE", "")]
    if files[-1] == os.devnull:  # pip's convention for no file
        return {}
    parser = configparser.RawConfigParser()
    for file in filter(None, files):
        # A file that pip cannot read either stops pip with its own message later.
        with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
            parser.read(file, encoding="utf-8")
    sections = [name for name in ("global", "install") if parser.has_section(name)]
    return {key: value for name in sections for key, value in parser.items(name)}


class PackageIndex:
    """Configured indexes, queried file by file; safe for several threads."""

    def __init__(self, settings: IndexSettings) -> None:
        self._settings = settings
        named = settings.certificates
        # A missing file would stop every download; the system's authorities may suffice.
        context = ssl.create_default_context(cafile=named if os.path.isfile(named) else None)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))

    def files_of(self, name: str) -> Iterator[list[IndexedFile]]:
        """Yield the files that each place has of a package, folders before indexes.

        Raises:
            IndexUnreachable: a required index does not answer.
        """
        for link in self._settings.links:
            yield list(self._linked(link, name))
        from packaging.utils import canonicalize_name  # slow to import; most agents query no index

        for index in self._settings.indexes:
            url = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
            yield list(self._page(url + "index.html" if url.startswith("file:") else url))

    @contextlib.contextmanager
    def opened(self, url: str, start: int = 0) -> Iterator[tuple[Iterator[bytes], int]]:
        """Open a file for the block; yield its blocks and their first offset.

        Raises:
            IndexUnreachable: it cannot be fetched, or the connection breaks.
        """
        try:
            answer = self._get(url, {"Range": f"bytes={start}-"} if start else {})
        except FileNotFoundError as error:
            raise IndexUnreachable(url, "it is listed but not there") from error
        with answer:
            # 206: the server honours the range; else it sends the file from its beginning.
            is_rest = getattr(answer, "status", None) == 206
            yield _blocks(answer, url), start if is_rest else 0

    def size_of(self, url: str) -> int | None:
        """Return the size of a file as given by its server, or None."""
        with contextlib.suppress(IndexUnreachable), self._get(url, {}, "HEAD") as answer:
            length = answer.headers.get("Content-Length", "")
            return int(length) if length.isdecimal() else None
        return None

    def _linked(self, link: str, name: str) -> Iterator[IndexedFile]:
        if link.startswith(("http://", "https://")):
            yield from self._page(link)
            return
        from packaging.utils import canonicalize_name

        path = Path(unquote(urlsplit(link).path) if link.startswith("file:") else link)
        with contextlib.suppress(OSError):
            for file in sorted(path.expanduser().absolute().iterdir()):
                if canonicalize_name(file.name.partition("-")[0]) == canonicalize_name(name):
                    # Hashed now, so that an index is queried if this file is another one.
                    yield IndexedFile(
                        name=file.name,
                        url=file.as_uri(),
                        sha256=hash_file(file),
                        size_bytes=file.stat().st_size,
                    )

    def _page(self, url: str) -> Iterator[IndexedFile]:
        try:
            with self._get(url, {"Accept": _ACCEPT}) as answer:
                data = answer.read(_MAX_PAGE_BYTES)
                kind = answer.headers.get("Content-Type", "")
                base = answer.geturl()
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise IndexUnreachable(url, str(error)) from error
        try:
            files = _read_json(data) if "json" in kind else _read_html(data)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise IndexUnreachable(url, "it answers with no package index") from error
        for file in files:
            address, claim = urldefrag(urljoin(base, file.url))
            # A web page must not name files of this PC.
            if not url.startswith("file:") and not address.startswith(("http://", "https://")):
                continue
            hashed = file.sha256 or claim.removeprefix("sha256=")
            sha256 = hashed if _SHA256.fullmatch(hashed) else None
            yield replace(file, url=_with_login(address, url), sha256=sha256)

    def _get(self, url: str, headers: Mapping[str, str], method: str = "GET") -> Any:
        place, login = _split_login(url)
        request = urllib.request.Request(place, headers=dict(headers), method=method)
        if login:
            # Unredirected, so that another server does not receive the login.
            request.add_unredirected_header("Authorization", f"Basic {login}")
        try:
            return self._opener.open(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise FileNotFoundError(place) from error
            raise IndexUnreachable(place, f"it answers {error.code}") from error
        except urllib.error.URLError as error:
            if place.startswith("file:"):
                raise FileNotFoundError(place) from error
            raise IndexUnreachable(place, str(error.reason)) from error
        except OSError as error:
            raise IndexUnreachable(place, str(error)) from error


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with file.open("rb") as opened:
        return hash_rest(opened)


def hash_rest(opened: IO[bytes]) -> str:
    """Return the SHA-256 of the rest of an open file, in hex."""
    digest = hashlib.sha256()
    while block := opened.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _blocks(answer: IO[bytes], url: str) -> Iterator[bytes]:
    while True:
        try:
            block = answer.read(_BLOCK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise IndexUnreachable(url, str(error) or "the connection broke") from error
        if not block:
            return
        yield block


def hide_login(url: str) -> str:
    """Return an address without its user and password.

    >>> hide_login("https://me:secret@index.example/a-1-py3-none-any.whl")
    'https://index.example/a-1-py3-none-any.whl'
    """
    return _split_login(url)[0]


def _host(url: str) -> str:
    return urlsplit(url).hostname or url


def _split_login(url: str) -> tuple[str, str]:
    """Return an address without its user and password, and the two in base64."""
    parts = urlsplit(url)
    who, _, host = parts.netloc.rpartition("@")
    login = base64.b64encode(unquote(who).encode()).decode() if who else ""
    return urlunsplit(parts._replace(netloc=host)), login


def _with_login(url: str, page: str) -> str:
    """Return a file's address with the login of the page that lists it, on the same host."""
    own, listed = urlsplit(page), urlsplit(url)
    if own.hostname == listed.hostname and "@" in own.netloc and "@" not in listed.netloc:
        login = own.netloc.rpartition("@")[0]
        return urlunsplit(listed._replace(netloc=f"{login}@{listed.netloc}"))
    return url


def _read_json(data: bytes) -> list[IndexedFile]:
    files = json.loads(data)["files"]
    return [
        IndexedFile(
            name=str(file["filename"]),
            url=str(file["url"]),
            sha256=file.get("hashes", {}).get("sha256"),
            size_bytes=size if isinstance(size := file.get("size"), int) else None,
        )
        for file in files
    ]


class _Links(HTMLParser):
    """Collects the addresses of a page's links."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found += [value for name, value in attrs if name == "href" and value]


def _read_html(data: bytes) -> list[IndexedFile]:
    links = _Links()
    links.feed(data.decode("utf-8", "replace"))
    return [
        IndexedFile(name=unquote(urlsplit(link).path.rpartition("/")[2]), url=link)
        for link in links.found
    ]
