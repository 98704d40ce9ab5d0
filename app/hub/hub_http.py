"""Ask the hub for small answers: bounded in size and time, and with the token for its host alone.

The hub's own client reads answers of any size and takes the token along to further pages on other
hosts, so searches and configs are read here; large files are left to it.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from agents.contract.hub import read_token
from app.hub.token_keyring import stored_token

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

SILENCE_S = 10.0
"""Maximum silence of the hub within an answer, in seconds."""
ANSWER_S = 30.0
"""Maximum duration of an answer, in seconds."""
MAX_THREADS = 4
"""Maximum number of requests at the same time."""
ENDPOINT = "https://huggingface.co"
_NEXT = re.compile(r'<([^<>]{1,4000})>\s*;\s*rel="next"')
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAnswer:
    data: bytes
    next_address: str = ""
    """Address of the next page, always of the same host; empty: this is the last one."""


Ask = Callable[[str, Mapping[str, str], int], HubAnswer]
"""Returns the answer to a request from its address, its headers and the maximum size in bytes."""


def ask(address: str, headers: Mapping[str, str], most_bytes: int) -> HubAnswer:
    """Return the answer of the hub.

    Raises:
        HTTPError: the hub refused the request.
        OSError: the network failed.
        ValueError: the answer is too large, or the address cannot be used.
    """
    # Imported on use: most commands never ask the hub.
    from http.client import HTTPException
    from urllib.request import Request

    end_s = time.monotonic() + ANSWER_S
    data = bytearray()
    request = Request(address, headers=dict(headers))
    try:
        with _make_opener().open(request, timeout=SILENCE_S) as answer:
            while block := answer.read1(1 << 16):
                data += block
                if len(data) > most_bytes:
                    raise ValueError(f"it has more than {most_bytes} bytes")
                if time.monotonic() > end_s:
                    raise TimeoutError(f"it took longer than {ANSWER_S:.0f} s")
            if answer.length:
                raise OSError("the connection ended within the answer")
            return HubAnswer(data=bytes(data), next_address=_find_next(answer.url, answer.headers))
    except HTTPException as error:  # no HTTP, or a connection that was cut
        raise OSError(f"{type(error).__name__}: {error}") from error


def _make_opener() -> OpenerDirector:
    from urllib.error import HTTPError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class SameHost(HTTPRedirectHandler):
        """Follows a redirect to another host without the token."""

        max_redirections = 5

        def redirect_request(
            self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
        ) -> Request | None:
            if origin_of(newurl)[0] not in ("http", "https"):
                raise HTTPError(newurl, code, "a redirect to no web page", headers, fp)
            new = super().redirect_request(req, fp, code, msg, headers, newurl)
            if new is not None and origin_of(new.full_url) != origin_of(req.full_url):
                new.remove_header("Authorization")
            return new

    return build_opener(SameHost)


def origin_of(address: str) -> tuple[str, str]:
    """Return scheme, and host with port, of an address.

    >>> origin_of("https://hub.example:8443/api/models")
    ('https', 'hub.example:8443')
    """
    parts = urlsplit(address)
    return parts.scheme.lower(), parts.netloc.lower()


def _find_next(address: str, headers: Message) -> str:
    """Return the address of the next page, unless it is on another host."""
    found = _NEXT.search(headers.get("Link", ""))
    if found is None:
        return ""
    following = urljoin(address, found[1])
    return following if origin_of(following) == origin_of(address) else ""


def read_endpoint(environ: Mapping[str, str]) -> str:
    """Return the address of the hub, without a slash at its end."""
    return (environ.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")


def is_offline(environ: Mapping[str, str]) -> bool:
    """Return whether the user keeps the hub's tools from asking it."""
    return environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no")


def make_headers(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of a request, with this PC's token if there is one."""
    token = read_token(environ) or stored_token()[0]
    return {"Authorization": f"Bearer {token}"} if token else {}


def read_wait_s(headers: Mapping[str, str]) -> float | None:
    """Return how long the hub asks to wait after too many requests, in seconds; None: unknown.

    >>> read_wait_s({"Retry-After": "20"}), read_wait_s({"RateLimit": '"api";r=0;t=55'})
    (20.0, 55.0)
    """
    known = {name.lower(): value for name, value in headers.items()}
    found = re.fullmatch(r"\s*(\d{1,6})\s*", known.get("retry-after", ""))
    found = found or re.search(r";\s*t=(\d{1,6})", known.get("ratelimit", ""))
    return float(found[1]) if found else None


class HubThreads:
    """Runs requests on a few threads that a closing program does not wait for.

    A request cannot be ended, so one that was given up keeps its thread until its time limit.
    """

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(MAX_THREADS)

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call, or raise its error."""
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(result: T | None, error: Exception | None) -> None:
            self._free.release()
            if future.done():  # given up
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type] # of type T without an error

        def work() -> None:
            result, failure = None, None
            try:
                result = call()
            except Exception as error:  # noqa: BLE001 - raised by `run`
                failure = error
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, result, failure)

        threading.Thread(target=work, daemon=True, name="hub").start()
        return await future
