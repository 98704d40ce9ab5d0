"""Rows about the variables of the nodes' logins."""

from __future__ import annotations

from dataclasses import replace

from agents.contract.node import LoginVariable
from app.provisioning.check_row import CheckRow
from app.provisioning.checks.variables import agreed_variables, judge_variables
from tests.fakes.checked import FACTS, checked, group_of


def rows_of(**variables: tuple[LoginVariable, ...]) -> list[CheckRow]:
    nodes = [
        checked(name=name, facts=replace(FACTS, variables=found))
        for name, found in variables.items()
    ]
    return list(judge_variables(group_of(*nodes)))


def test_what_training_ignores_is_named_with_its_file() -> None:
    debug = LoginVariable(name="TORCH_DISTRIBUTED_DEBUG", file="~/.bashrc")
    preload = LoginVariable(name="LD_PRELOAD")
    (row,) = rows_of(a=(), b=(debug, preload))
    assert (row.check, row.node, row.status) == ("variables", "b", "pass")
    assert row.message == (
        "training ignores TORCH_DISTRIBUTED_DEBUG (~/.bashrc); in effect here: LD_PRELOAD"
    )
    assert "TORCH_DISTRIBUTED_DEBUG changes how ranks connect" in row.evidence


def test_a_list_of_gpus_warns_because_all_are_used() -> None:
    (row,) = rows_of(a=(LoginVariable(name="CUDA_VISIBLE_DEVICES", file="/etc/environment"),))
    assert row.status == "warn"
    assert "CUDA_VISIBLE_DEVICES (/etc/environment) hides or reorders GPUs" in row.message
    assert "Remove it in /etc/environment" in row.fix


def test_nodes_have_to_agree_on_nccl() -> None:
    ring, tree = (LoginVariable(name="NCCL_ALGO", value=value) for value in ("Ring", "Tree"))
    assert rows_of(a=(ring,), b=(ring,)) == []
    for other in ((tree,), ()):
        rows = rows_of(a=(ring,), b=other)
        assert {row.status for row in rows} == {"warn"}
        assert [row.node for row in rows] == (["a", "b"] if other else ["a"])
        assert "is not the same on all nodes" in rows[0].message


def test_variables_that_another_version_knows_are_no_row() -> None:
    assert rows_of(a=(LoginVariable(name="EDITOR", value="vi"),)) == []


def test_only_agreed_values_reach_the_ranks() -> None:
    ring = LoginVariable(name="NCCL_ALGO", value="Ring")
    preload = LoginVariable(name="LD_PRELOAD", value="/tmp/evil.so")
    found = (ring, preload)
    facts = {name: replace(FACTS, variables=found) for name in ("a", "b")}
    assert agreed_variables(facts) == {"NCCL_ALGO": "Ring"}
    assert agreed_variables({**facts, "c": FACTS}) == {}
