"""Judge the variables of the nodes' logins: those that training leaves out, or that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agents.contract.node import LoginVariable, NodeFacts
from agents.shared.login_variables import Rule, agree, find_rule
from app.provisioning.check_row import CheckedGroup, CheckRow, make_row
from app.text import show_list

_SPARE = "to spare a GPU, leave its node out of the run"


def agreed_variables(facts: Mapping[str, NodeFacts]) -> dict[str, str]:
    """Return the variables that ranks get because all these nodes have the same value."""
    return agree({name: _comparable(known.variables) for name, known in facts.items()})


def find_ineffective(facts: Mapping[str, NodeFacts]) -> dict[str, tuple[LoginVariable, ...]]:
    """Return the variables of each node without the effect that its user probably expects."""
    kept = agreed_variables(facts)
    return {
        name: tuple(one for one in known.variables if _is_ineffective(one, kept))
        for name, known in facts.items()
    }


def explain_ineffective(variable: LoginVariable) -> tuple[str, str]:
    """Return the problem with such a variable, and what to do."""
    rule, name = _rule(variable), _show(variable)
    there = f"in {variable.file}" if variable.file else "in the login of that user"
    if rule.fate == "overruled":
        text = f"{name} {rule.effect}; training ignores it and gives each rank one GPU by its UUID"
        return text, f"Remove it {there} unless other programs need it; {_SPARE}"
    text = f"{name} is not the same on all nodes, so training ignores it: it {rule.effect}"
    return text, f"Remove it {there}, or set it to the same value on all nodes"


def judge_variables(group: CheckedGroup) -> tuple[CheckRow, ...]:
    """Report variables that training leaves out, and those that change it on one node only."""
    facts = {name: node.facts for name, node in group.nodes.items()}
    ineffective, rows = find_ineffective(facts), []
    for name, known in facts.items():
        for one in ineffective[name]:
            text, fix = explain_ineffective(one)
            rows.append(make_row("variables", name, "warn", text, fix))
        ignored, in_effect = (
            [one for one in known.variables if _rule(one).fate == fate]
            for fate in ("removed", "shown")
        )
        parts = []
        if ignored:
            parts.append(f"training ignores {show_list([_show(one) for one in ignored])}")
        if in_effect:
            parts.append(f"in effect here: {show_list([_show(one) for one in in_effect])}")
        if parts:
            evidence = "; ".join(f"{one.name} {_rule(one).effect}" for one in ignored + in_effect)
            text = "; ".join(parts)
            rows.append(make_row("variables", name, "pass", text, "", evidence=evidence))
    return tuple(rows)


def _comparable(variables: Sequence[LoginVariable]) -> dict[str, str]:
    return {one.name: one.value for one in variables if _rule(one).fate == "agreed"}


def _is_ineffective(variable: LoginVariable, kept: Mapping[str, str]) -> bool:
    fate = _rule(variable).fate
    return fate == "overruled" or (fate == "agreed" and variable.name not in kept)


def _rule(variable: LoginVariable) -> Rule:
    # By the master's own list: the node only names what it has.
    return find_rule(variable.name) or Rule("", "kept")


def _show(variable: LoginVariable) -> str:
    return f"{variable.name} ({variable.file})" if variable.file else variable.name
