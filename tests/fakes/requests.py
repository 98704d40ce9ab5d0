"""Base of fakes of a node, which answer each class of requests with a method of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from agents.contract.requests import Answer, NodeRequest
from app.progress import OnProgress

Method = TypeVar("Method", bound=Callable[..., Any])
Report = OnProgress | None


def answers(request: type[NodeRequest[Any]]) -> Callable[[Method], Method]:
    """Return a decorator of the method that answers a class of requests."""

    def mark(method: Method) -> Method:
        vars(method)["answers"] = request
        return method

    return mark


class FakeAgent:
    """Calls the method that `answers` a request, with the request and the callback for progress."""

    async def ask(self, request: NodeRequest[Answer], progress: OnProgress | None = None) -> Answer:
        for cls in type(self).__mro__:
            for name, method in vars(cls).items():
                if getattr(method, "answers", None) is type(request):
                    # By name, since tests replace methods of one node.
                    answer: Answer = await getattr(self, name)(request, progress)
                    return answer
        raise NotImplementedError(type(request).__name__)
