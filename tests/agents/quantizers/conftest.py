"""The same small model and fork server as the trainer's tests, and packages that are not there."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from tests.agents.trainer.conftest import fork_server, tiny_model

__all__ = ["fork_server", "stand_in", "tiny_model"]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, dict[str, Any]]], None]:
    """Put modules with these names in the place of a package's, with the packages around them."""

    def put(modules: dict[str, dict[str, Any]]) -> None:
        for module in modules:
            parts = module.split(".")
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for module, names in modules.items():
            vars(sys.modules[module]).update(names)

    return put
