"""Actions of a user: requests with typed answers, which the core performs.

An action is one class: its fields are the arguments, its docstring is the help, and `perform` does
the work. The command line, the window and the tests hand it to `core.do`. `list_actions` is the one
list, with a dotted name for each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    Protocol,
    TypeVar,
    cast,
    dataclass_transform,
)

from agents.contract.messages import Progress

if TYPE_CHECKING:
    from app.core.state import CoreState
    from app.events import EventHub
    from app.settings import Value

Answer = TypeVar("Answer", covariant=True)
Result = TypeVar("Result")
ActionClass = TypeVar("ActionClass", bound="type[Action[Any]]")

Report = Callable[[object], None]
"""Receives what an action reports before its answer: `Progress`, or an event class of its file."""


class Action(Generic[Answer]):
    """Request to the core; a subclass is declared with `@action(NAME)`."""

    __slots__ = ()
    dotted_name: ClassVar[str]
    """Stable name, such as `runs.stop`."""

    async def perform(self, core: CoreState, report: Report) -> Answer:
        """Do the work and return the answer."""
        raise NotImplementedError


_ACTIONS: dict[str, type[Action[Any]]] = {}


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
def action(name: str) -> Callable[[ActionClass], ActionClass]:
    """Make a class a frozen dataclass with keywords only, and list it by its dotted name."""

    def declare(plain: ActionClass) -> ActionClass:
        made = cast(ActionClass, dataclass(frozen=True, kw_only=True, slots=True)(plain))
        made.dotted_name = name
        if _ACTIONS.setdefault(name, made) is not made:
            raise TypeError(f"two actions are called {name}")
        return made

    return declare


def list_actions() -> dict[str, type[Action[Any]]]:
    """Return every action by its dotted name."""
    import importlib  # on use: no command lists them
    import pkgutil

    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__, f"{__package__}."):
        importlib.import_module(module.name)
    return dict(_ACTIONS)


def sentences(say: Callable[[str], None]) -> Report:
    """Return a report that passes only the sentences of progress on."""

    def report(event: object) -> None:
        if isinstance(event, Progress):
            say(event.message)

    return report


def as_progress(report: Report) -> Callable[[str], None]:
    """Return a function that reports each sentence as progress."""
    return lambda text: report(Progress(message=text))


class SettingsSeam(Protocol):
    """Settings that front ends change."""

    def get(self, key: str, node: str = "") -> Value: ...
    def set(self, key: str, value: object) -> None: ...
    def of_nodes(self, key: str) -> dict[str, Value]: ...
    def set_of_node(self, node: str, key: str, value: object | None) -> None: ...


class CoreApi(Protocol):
    """Seam of the front ends, which `Core` and the fake of the tests satisfy."""

    notice: str
    """Problem found when the store was opened, for the user; empty: none."""

    # Properties: a more specific attribute of an implementation would not satisfy a settable one.
    @property
    def events(self) -> EventHub: ...
    @property
    def settings(self) -> SettingsSeam: ...
    async def do(self, action: Action[Result], report: Report | None = None) -> Result:
        """Perform an action and return its answer; `report` receives its events meanwhile."""
        ...


OpenCore = Callable[[], AbstractAsyncContextManager[CoreApi]]
