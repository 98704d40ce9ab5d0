"""The hub is searched within bounds, its refusals are explained, and its token stays with it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import UserError
from app.hub import hub_http, hub_search
from app.hub.hub_http import HubAnswer, HubThreads, ask
from app.hub.hub_item import HubItem
from app.hub.hub_search import HubSearch
from app.library.configs import ConfigLibrary
from tests.app.runs.inputs.test_hub_models import fill_cache
from tests.fakes.model_site import REVISION, Fault, ModelSite, model_site

TOKEN = "hf_" + "t" * 34
ABOUT = {
    "downloads": 1200,
    "likes": 7,
    "sha": REVISION,
    "tags": ["safetensors", "license:apache-2.0"],
    "safetensors": {"parameters": {"BF16": 1000, "F32": 10}, "total": 1010},
}


@pytest.fixture
def site() -> Iterator[ModelSite]:
    with model_site("org/gated", {"config.json": b"{}"}, (TOKEN,)) as site:
        for number in range(7):
            site.add(f"org/poet-{number}", about=ABOUT)
        site.add("org/poems", kind="dataset", about={"usedStorage": 99})
        yield site


def make_search(site: ModelSite, tmp_path: Path, **environ: str) -> HubSearch:
    found = {"HF_ENDPOINT": site.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path), **environ}
    return HubSearch(found)


async def test_a_search_follows_the_pages_up_to_its_limit(site: ModelSite, tmp_path: Path) -> None:
    search = make_search(site, tmp_path)
    found = await search.search("model", " Poet ", 5)
    assert [item.name for item in found.items] == [f"org/poet-{n}" for n in range(5)]
    assert (found.has_more, found.problem) == (True, "")
    assert found.items[0] == HubItem(
        kind="model",
        name="org/poet-0",
        size_bytes=2040,
        num_parameters=1010,
        licence="apache-2.0",
        downloads=1200,
        likes=7,
        revision=REVISION,
    )
    whole = await search.search("model", "", 200)
    assert (len(whole.items), whole.has_more) == (8, False)
    assert [item.name for item in whole.items if item.is_gated] == ["org/gated"]
    data = await search.search("data", "poems", 5)
    assert [(item.name, item.size_bytes) for item in data.items] == [("org/poems", 99)]
    assert {token for _, token in site.asked} == {TOKEN}
    assert (await search.search("data", "prose", 5)).items == ()


async def test_without_a_connection_the_cache_is_searched(site: ModelSite, tmp_path: Path) -> None:
    fill_cache(tmp_path / "hub")
    offline = make_search(site, tmp_path, HF_HUB_OFFLINE="1")
    found = await offline.search("model", "TINY", 5)
    assert [(item.name, item.is_cached) for item in found.items] == [("org/tiny", True)]
    assert "HF_HUB_OFFLINE" in found.problem
    assert site.asked == []
    unreached = make_search(site, tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    found = await unreached.search("model", "", 5)
    assert [item.name for item in found.items] == ["org/tiny"]
    assert found.problem.startswith("The hub cannot be reached: ")
    assert (await unreached.search("data", "", 5)).items == ()
    site.add("org/tiny")
    assert [
        one.is_cached
        for one in (await make_search(site, tmp_path).search("model", "tiny", 5)).items
    ] == [True]


@pytest.mark.parametrize(
    ("status", "headers", "message", "hint"),
    [
        (401, {}, "does not accept this PC's token", "settings/tokens"),
        (429, {"Retry-After": "90"}, "answers no more requests", "Wait 1 min 30 s, then"),
        (429, {"RateLimit": '"api";r=0;t=55'}, "answers no more requests", "Wait 55 s, then"),
        (429, {}, "answers no more requests", "Wait some minutes"),
        (500, {}, "it answers 500", "Try again later"),
        (200, {}, "answer cannot be read", "Check HF_ENDPOINT"),
    ],
)
async def test_a_refusal_is_explained(
    site: ModelSite, tmp_path: Path, status: int, headers: dict[str, str], message: str, hint: str
) -> None:
    site.faults.append(Fault("/api/models", status, headers, b"<html>"))
    with pytest.raises(UserError, match=message) as caught:
        await make_search(site, tmp_path).search("model", "x", 5)
    assert hint in caught.value.hint


async def test_a_connection_that_is_cut_is_no_answer(site: ModelSite, tmp_path: Path) -> None:
    site.faults.append(Fault("/api/models", 200, {"Content-Length": "999"}, b"[]"))
    found = await make_search(site, tmp_path).search("model", "x", 5)
    assert found.problem == "The hub cannot be reached: the connection ended within the answer"


def test_the_token_never_leaves_the_host_of_the_hub(site: ModelSite, tmp_path: Path) -> None:
    config = b'{"hidden_size": 8}'
    with model_site("org/other", {}, ()) as elsewhere:
        elsewhere.faults.append(Fault("/", 200, {}, config))
        for status in (301, 302, 303, 307, 308):
            site.faults[:] = [Fault("config.json", status, {"Location": f"{elsewhere.url}/x"})]
            environ = {"HF_ENDPOINT": site.url, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
            shelf = ConfigLibrary(tmp_path / str(status), environ)
            assert shelf.fetch("org/poet-0").config == {"hidden_size": 8}
        assert {token for _, token in elsewhere.asked} == {""}
        elsewhere.asked.clear()
        # A redirect within the hub, as for a renamed model, keeps it.
        site.faults[:] = [
            Fault("/old", 302, {"Location": f"{site.url}/org/gated/resolve/main/config.json"})
        ]
        assert ask(f"{site.url}/old", {"Authorization": f"Bearer {TOKEN}"}, 99).data == b"{}"
        link = {"Link": f'<{elsewhere.url}/api/models?cursor=2>; rel="next"'}
        site.faults[:] = [Fault("/api/models", 200, link, b"[]")]
        found = asyncio.run(make_search(site, tmp_path).search("model", "x", 5))
        assert (found.items, found.has_more, elsewhere.asked) == ((), False, [])


def test_a_redirect_leads_to_no_file_of_this_pc(site: ModelSite, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    for place in (f"file://{tmp_path}/secret", "ftp://127.0.0.1:9/x", "data:text/plain,x"):
        site.faults[:] = [Fault("/a", 302, {"Location": place})]
        with pytest.raises(OSError, match=r"[a-z]"):
            ask(f"{site.url}/a", {}, 99)


def test_answers_are_bounded_in_size_time_and_number_of_pages(
    site: ModelSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.faults[:] = [Fault("/big", 200, {}, bytes(1000))]
    with pytest.raises(ValueError, match="more than 999 bytes"):
        ask(f"{site.url}/big", {}, 999)
    monkeypatch.setattr(hub_http, "ANSWER_S", -1.0)
    with pytest.raises(TimeoutError, match="took longer"):
        ask(f"{site.url}/big", {}, 1000)
    pages: list[str] = []

    def ask_endlessly(address: str, headers: object, most: int) -> HubAnswer:
        pages.append(address)
        return HubAnswer(data=b"[]", next_address=f"{site.url}/{len(pages)}")

    environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": site.url}
    found = asyncio.run(HubSearch(environ, ask_endlessly).search("model", "", 200))
    assert (len(pages), found.items, found.has_more) == (hub_search.MAX_PAGES, (), True)
    deep = HubSearch(environ, lambda *asked: HubAnswer(data=b"[" * 100_000))
    with pytest.raises(UserError, match="cannot be read"):
        asyncio.run(deep.search("model", "", 20))


HOSTILE: list[object] = [
    None, 7, [], {}, {"id": 7}, {"id": "../../etc"}, {"id": "org/a\x1b[2J"}, {"id": "<b>/x"},
    {"id": "a" * 400}, {"id": "org/a/b"}, {"id": "org/\u202eevil"},
]  # fmt: skip


def test_entries_that_are_no_models_are_left_out(tmp_path: Path) -> None:
    odd = {
        "id": "org/odd", "downloads": -1, "likes": True, "gated": "auto", "sha": "../x",
        "tags": ["license:<img src=x>", 7], "safetensors": {"parameters": {"BF16": 10**40, "X": 1}},
    }  # fmt: skip
    data = json.dumps([*HOSTILE, odd]).encode()
    environ = {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://hub"}
    search = HubSearch(environ, lambda *asked: HubAnswer(data=data))
    found = asyncio.run(search.search("model", "", 20))
    assert found.items == (HubItem(kind="model", name="org/odd", num_parameters=1, is_gated=True),)


async def test_a_request_that_was_given_up_overwrites_nothing() -> None:
    threads, go_on, ended = HubThreads(), threading.Event(), threading.Event()

    def work() -> None:
        go_on.wait(20)
        ended.set()

    for _ in range(hub_http.MAX_THREADS):
        task = asyncio.ensure_future(threads.run(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    later = asyncio.ensure_future(threads.run(lambda: 7))
    await asyncio.sleep(0)
    assert not later.done()  # all threads are still busy
    go_on.set()
    assert await later == 7
    assert ended.is_set()
