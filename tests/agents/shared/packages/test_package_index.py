"""Which indexes are asked, and what is read from their pages."""

from __future__ import annotations

import functools
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agents.shared.packages.package_index import (
    PYPI,
    IndexSettings,
    IndexUnreachable,
    PackageIndex,
    read_index_settings,
)
from tests.fakes.package_site import package_site
from tests.fakes.packages import make_wheel, sha256_of


def test_the_settings_are_those_of_pip_else_of_uv_else_pypi(tmp_path: Path) -> None:
    assert read_index_settings({"PIP_CONFIG_FILE": "/dev/null"}, tmp_path).indexes == (PYPI,)
    uv = {"UV_DEFAULT_INDEX": "https://uv.example/simple", "PIP_CONFIG_FILE": "/dev/null"}
    assert read_index_settings(uv, tmp_path, "https://more.example").indexes == (
        "https://uv.example/simple",
        "https://more.example",
    )
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://mirror.example/simple\nfind-links =\n  /a\n  /b\n"
        "[install]\nextra-index-url = https://two.example https://three.example\n"
    )
    told = read_index_settings({**uv, "PIP_CONFIG_FILE": str(config)}, tmp_path)
    assert told.indexes[0] == "https://mirror.example/simple"
    assert told.indexes[-2:] == ("https://two.example", "https://three.example")
    assert told.links == ("/a", "/b")
    variables = {"PIP_CONFIG_FILE": str(config), "PIP_INDEX_URL": "https://env.example"}
    assert read_index_settings(variables, tmp_path).indexes[0] == "https://env.example"
    off = read_index_settings({**variables, "PIP_NO_INDEX": "1"}, tmp_path, "https://more.example")
    assert off.indexes == ()


@pytest.mark.parametrize("with_html", [False, True])
def test_pages_of_both_kinds_name_the_same_files(tmp_path: Path, with_html: bool) -> None:
    with package_site(tmp_path / "site") as site:
        wheel = make_wheel(site.folder, "Tiny_Thing")
        site.with_html = with_html
        index = PackageIndex(IndexSettings(indexes=(site.url,), links=(str(site.folder),)))
        in_folder, in_index = index.files_of("tiny.thing")
        assert [file.sha256 for file in (*in_folder, *in_index)] == [sha256_of(wheel)] * 2
        assert [file.name for file in in_index] == [wheel.name]
        with index.opened(in_index[0].url, 10) as (blocks, start):
            assert (start, b"".join(blocks)) == (10, wheel.read_bytes()[10:])
        assert index.size_of(in_index[0].url) == wheel.stat().st_size
        assert list(index.files_of("other")) == [[], []]


def test_a_folder_of_pages_is_an_index_too(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    (tmp_path / "simple" / "tiny-thing").mkdir(parents=True)
    page = f'<a href="../../{wheel.name}">{wheel.name}</a>'
    (tmp_path / "simple" / "tiny-thing" / "index.html").write_text(page)
    index = PackageIndex(IndexSettings(indexes=((tmp_path / "simple").as_uri(),)))
    ((file,),) = index.files_of("tiny_thing")
    with index.opened(file.url) as (blocks, start):
        assert (start, b"".join(blocks)) == (0, wheel.read_bytes())
    assert list(index.files_of("other")) == [[]]


class Strange(BaseHTTPRequestHandler):
    """An index that answers what it is told to, and keeps the last login."""

    def __init__(self, said: list[str], status: int, body: bytes, *more: object) -> None:
        self._said, self._status, self._body = said, status, body
        super().__init__(*more)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        self._said.append(self.headers.get("Authorization", ""))
        self.send_response(self._status)
        self.end_headers()
        self.wfile.write(self._body)

    def log_message(self, *args: object) -> None:
        return


@pytest.mark.parametrize(
    ("status", "body", "files"),
    [
        (403, b"", None),
        (200, b"\x00\xff no page", []),
        (200, b'<a href="file:///etc/passwd-1-py3-none-any.whl">x</a>', []),
        (200, b'<a href="/a-1-py3-none-any.whl#sha256=short">x</a>', [None]),
    ],
)
def test_what_an_index_says_is_not_trusted(
    status: int, body: bytes, files: list[str | None] | None
) -> None:
    said: list[str] = []
    handler = functools.partial(Strange, said, status, body)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"http://me:pass%40word@127.0.0.1:{server.server_port}/simple"
        index = PackageIndex(IndexSettings(indexes=(url,)))
        if files is None:
            with pytest.raises(IndexUnreachable, match=r"^127\.0\.0\.1: it answers 403"):
                list(index.files_of("a"))
        else:
            assert [file.sha256 for (found,) in [index.files_of("a")] for file in found] == files
        server.shutdown()
    assert said == ["Basic bWU6cGFzc0B3b3Jk"]


def test_an_index_that_does_not_answer_is_named_without_its_login() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    index = PackageIndex(IndexSettings(indexes=(f"http://me:secret@127.0.0.1:{port}/simple",)))
    with pytest.raises(IndexUnreachable, match=r"^127\.0\.0\.1: .*refused") as caught:
        list(index.files_of("a"))
    assert "secret" not in str(caught.value)
