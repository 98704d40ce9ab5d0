"""The list of actions, which front ends read: names, help, typed fields and answers."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from app.core.action import Action, action, list_actions

SECRETS = {"password", "passwords", "token"}
ACTIONS = list_actions()


def test_every_action_is_in_the_list_under_one_name() -> None:
    declared = [kind for kind in Action.__subclasses__() if kind.__module__.startswith("app.")]
    # By name: a dataclass with slots is a copy of its class.
    assert {kind.__name__ for kind in declared} == {kind.__name__ for kind in ACTIONS.values()}
    assert len({kind.__name__ for kind in ACTIONS.values()}) == len(ACTIONS)


@pytest.mark.parametrize("name", ACTIONS)
def test_an_action_has_a_name_help_typed_fields_and_an_answer(name: str) -> None:
    kind = ACTIONS[name]
    assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)
    assert kind.dotted_name == name
    assert kind.__doc__, "it has no help"
    assert not kind.__doc__.startswith(f"{kind.__name__}("), "its help is made by dataclass"
    assert all(one.kw_only and one.type for one in fields(kind))
    assert kind.perform.__annotations__["return"]
    assert "__slots__" in vars(kind)


def test_no_secret_is_shown_with_its_action() -> None:
    shown = [
        f"{name}: {one.name}"
        for name, kind in ACTIONS.items()
        for one in fields(kind)
        if one.name in SECRETS and one.repr
    ]
    assert shown == []


def test_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(TypeError, match=r"two actions are called runs\.stop"):

        @action("runs.stop")
        class Another(Action[None]):
            """It stops a run, too."""
