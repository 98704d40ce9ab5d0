"""A typed or pasted list of PCs to add: its lines, and the outcome of each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.errors import UsageError
from app.flows.add_node import suggest_name
from app.nodes.node import check_node_name, parse_ssh_target
from app.shell_words import command_here
from app.text import capitalize, count_of

LIST_FORM = "NAME USER@HOST[:PORT], or only a host; one PC a line, or commas between them"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLine:
    number: int
    """Number of the line in the text, from 1."""
    name: str
    """Name that the node gets."""
    target: str
    """Address, as after `ssh`."""
    problem: str = ""
    """Problem of the line; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOutcome:
    line: NodeLine
    state: Literal["added", "confirm", "failed"]
    """`confirm`: it waits for the user to compare its fingerprint."""
    message: str
    host: str = ""
    """Host whose key is to be confirmed: the PC, or a jump host on the way to it."""
    fingerprint: str = ""
    """Fingerprint of its host key; empty unless it needs confirmation."""
    account: str = ""
    """Account that refuses this PC's keys but may accept a password; empty: no account does."""


def parse_node_list(text: str, taken: Iterable[str]) -> tuple[NodeLine, ...]:
    """Return the PCs of a list; each missing name is replaced by a suggestion of its own.

    >>> [(x.name, x.target) for x in parse_node_list("big anna@pc-2 # mine\\n10.0.0.3,gamer", ())]
    [('big', 'anna@pc-2'), ('node-1', '10.0.0.3'), ('gamer', 'gamer')]
    """
    names = list(taken)
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        content = re.sub(r"(^|\s)#.*", "", line)
        for entry in filter(None, (part.strip() for part in content.split(","))):
            one = _parse_entry(number, entry.split(), names)
            names.append(one.name)
            found.append(one)
    return tuple(found)


def _parse_entry(number: int, words: Sequence[str], taken: Sequence[str]) -> NodeLine:
    name, target = (words[0], words[1]) if len(words) == 2 else ("", words[0])
    problem = ""
    try:
        if len(words) > 2:
            raise UsageError(f"{' '.join(words)!r} has too many words", f"Write {LIST_FORM}")
        host = parse_ssh_target(target).host
        name = name or suggest_name(host, taken)
        check_node_name(name)
        if name in taken:
            problem = f"A node named {name} already exists, or stands above."
    except UsageError as error:
        problem = f"{capitalize(error.message)}. {error.hint}."
    return NodeLine(number=number, name=name or target, target=target, problem=problem)


def how_to_add_alone(outcome: NodeOutcome) -> str:
    """Return how to add a PC that needs a password, which a list cannot ask for.

    >>> line = NodeLine(number=1, name="big", target="anna@pc")
    >>> how_to_add_alone(NodeOutcome(line=line, state="failed", message="", account="anna@pc:22"))
    'Add big alone, which asks for the password: rackless nodes add big --ssh anna@pc'
    """
    name, target = outcome.line.name, outcome.line.target
    command = command_here("rackless", "nodes", "add", name, "--ssh", target)
    return f"Add {name} alone, which asks for the password: {command}"


def summarise_outcomes(outcomes: Sequence[NodeOutcome]) -> str:
    """Count the PCs that were added, wait, need a password, or failed, in a sentence.

    >>> line = NodeLine(number=1, name="a", target="a")
    >>> summarise_outcomes([NodeOutcome(line=line, state="added", message="")])
    '1 PC is added.'
    """
    by_state = {state: sum(o.state == state for o in outcomes) for state in ("added", "failed")}
    waiting = len(outcomes) - sum(by_state.values())
    parts = []
    if by_state["added"]:
        is_are = "is" if by_state["added"] == 1 else "are"
        parts.append(f"{count_of(by_state['added'], 'PC')} {is_are} added")
    if waiting:
        parts.append(f"{count_of(waiting, 'fingerprint')} to compare")
    locked = sum(o.state == "failed" and bool(o.account) for o in outcomes)
    if locked:
        parts.append(f"{locked} {'wants' if locked == 1 else 'want'} a password")
    if by_state["failed"] > locked:
        parts.append(f"{by_state['failed'] - locked} could not be added")
    return f"{', '.join(parts) or 'No PC is listed'}."
