"""Search the hub for models and data sets; without a connection, this PC's cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from agents.contract.requests.hub import CachedKind
from agents.shared.files.hub_cache import list_cache
from app.errors import UserError
from app.hub import hub_http
from app.hub.hub_http import Ask
from app.hub.hub_item import HubItem, HubResults, read_item
from app.text import show_duration

if TYPE_CHECKING:
    from urllib.error import HTTPError

MAX_ITEMS = 200
"""Maximum number of results of one search."""
MAX_PAGE_BYTES = 8 << 20
"""Maximum size of a page of the hub's answer, in bytes; an entry has about a thousand."""
MAX_PAGES = 20
"""Maximum number of pages of one search."""
_PAGE_ITEMS = 50
_MORE = ("gated", "downloads", "likes", "tags", "sha")
_FIELDS: dict[CachedKind, tuple[str, ...]] = {
    "model": (*_MORE, "safetensors"),
    "data": (*_MORE, "usedStorage"),
}
_PATHS: dict[CachedKind, str] = {"model": "models", "data": "datasets"}
_NOUNS: dict[CachedKind, str] = {"model": "models", "data": "data sets"}
_TOKENS = "https://huggingface.co/settings/tokens"


class HubSearch:
    """Searches of the hub and of this PC's cache.

    Args:
        environ: environment of this process, which locates the hub and its cache.
        ask: sends a request.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, ask: Ask = hub_http.ask) -> None:
        self._environ = os.environ if environ is None else environ
        self._ask = ask
        self.threads = hub_http.HubThreads()

    async def search(self, kind: CachedKind, words: str, limit: int) -> HubResults:
        """Return what the hub finds, the most downloaded first.

        Without a connection these are the matches of the cache, with the problem.

        Raises:
            UserError: the hub refuses, or its answer cannot be read.
        """
        return await self.threads.run(lambda: self._search(kind, words, limit))

    def _search(self, kind: CachedKind, words: str, limit: int) -> HubResults:
        words, limit = words.strip()[:200], min(limit, MAX_ITEMS)
        cached = self._list_cached(kind, words)
        if hub_http.is_offline(self._environ):
            return _from_cache(cached, "HF_HUB_OFFLINE keeps this PC from asking the hub", "")
        try:
            items, has_more = self._collect(kind, words, limit)
        except OSError as error:
            from urllib.error import HTTPError  # on use: most commands never ask

            if isinstance(error, HTTPError):
                raise _explain(error) from error
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            return _from_cache(
                cached,
                f"The hub cannot be reached: {reason[:200]}",
                "Check this PC's network. Meanwhile these are the "
                f"{_NOUNS[kind]} that this PC has already.",
            )
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"the hub's answer cannot be read: {str(error)[:200]}",
                "Check HF_ENDPOINT, and whether a proxy answers in place of the hub.",
            ) from error
        here = {item.name for item in cached}
        marked = tuple(replace(item, is_cached=item.name in here) for item in items)
        return HubResults(items=marked, has_more=has_more)

    def _collect(self, kind: CachedKind, words: str, limit: int) -> tuple[list[HubItem], bool]:
        asked: list[tuple[str, str]] = [("search", words)] if words else []
        # Only such weights can be trained.
        asked += [("filter", "safetensors")] if kind == "model" else []
        asked += [("sort", "downloads"), ("direction", "-1")]
        asked += [("limit", str(min(limit, _PAGE_ITEMS)))]
        asked += [("expand", field) for field in _FIELDS[kind]]
        endpoint = hub_http.read_endpoint(self._environ)
        address = f"{endpoint}/api/{_PATHS[kind]}?{urlencode(asked)}"
        headers = hub_http.make_headers(self._environ)
        items: dict[str, HubItem] = {}
        for _ in range(MAX_PAGES):
            answer = self._ask(address, headers, MAX_PAGE_BYTES)
            for said in _read_list(answer.data):
                item = read_item(kind, said)
                if item is not None:
                    items.setdefault(item.name, item)
            address = answer.next_address
            if not address or len(items) >= limit:
                break
        return list(items.values())[:limit], bool(address) or len(items) > limit

    def _list_cached(self, kind: CachedKind, words: str) -> list[HubItem]:
        return [
            HubItem(
                kind=kind,
                name=repo.name,
                size_bytes=repo.size_bytes,
                revision=repo.revisions[0] if repo.revisions else "",
                is_cached=True,
            )
            for repo in list_cache(self._environ)
            if repo.kind == kind and repo.is_whole and words.lower() in repo.name.lower()
        ]


def _read_list(data: bytes) -> list[Any]:
    said = json.loads(data)
    if not isinstance(said, list):
        raise ValueError("it is not a list")
    return said


def _from_cache(items: list[HubItem], problem: str, hint: str) -> HubResults:
    return HubResults(items=tuple(items), problem=problem, hint=hint)


def _explain(error: HTTPError) -> UserError:
    error.close()  # it holds the open response
    if error.code == 401:
        return UserError(
            "the hub does not accept this PC's token",
            f"Make one at {_TOKENS}, and keep it in the window's settings (or: hf auth login).",
            topic="model-download",
        )
    if error.code == 429:
        wait_s = hub_http.read_wait_s(dict(error.headers.items()))
        wait = f"Wait {show_duration(wait_s)}" if wait_s else "Wait some minutes"
        return UserError(
            "the hub answers no more requests of this PC for now", f"{wait}, then search again."
        )
    return UserError(f"the hub refused the search: it answers {error.code}", "Try again later.")
