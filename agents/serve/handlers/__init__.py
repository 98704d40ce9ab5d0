"""Map each request to its handler; a module of handlers is imported at its first request.

A handler takes the Call and the request, and returns the answer, or None for an empty one. It may
raise ExpectedError (the world's fault) or WireError (wrong arguments); the server turns them into
the response. Its module has the same name as the request's module in `agents.contract.requests`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from agents.contract.requests import NodeRequest, find_request
from agents.serve.channel import Call

R = TypeVar("R", bound=NodeRequest[Any])
Handler = Callable[[Call, R], Any]

_HANDLERS: dict[type[NodeRequest[Any]], Handler[Any]] = {}


def handles(request: type[R]) -> Callable[[Handler[R]], Handler[R]]:
    """Return a decorator for the function that answers a class of requests."""

    def register(handler: Handler[R]) -> Handler[R]:
        _HANDLERS[request] = handler
        return handler

    return register


def find_handler(kind: str) -> Callable[[Call], Any] | None:
    """Return the function that answers requests of this kind, or None if the kind is unknown."""
    request = find_request(kind)
    if request is None:
        return None
    handler = handler_of(request)
    return lambda call: handler(call, request.from_args(call.args))


def handler_of(request: type[R]) -> Handler[R]:
    """Return the function that answers a class of requests."""
    # The import registers the handlers of the module.
    room = request.__module__.rpartition(".")[2]
    importlib.import_module(f"agents.serve.handlers.{room}")
    return _HANDLERS[request]
