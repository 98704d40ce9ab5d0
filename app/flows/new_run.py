"""New run: the meaning of each answer, its problems, and the resulting RunSpec.

Known facts are not asked: nodes come from the cluster, shares of a batch are measured at the start.
The questions are the keys of `agents/contract/spec.py`. The conversion of answers to a spec and
back is in new_run_answers.py, the checks are in new_run_problems.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from agents.contract.data import parse_held_out
from agents.contract.key import RunKey
from agents.contract.node import NodeFacts
from agents.contract.objectives import OBJECTIVES
from agents.contract.parallel import find_mode
from agents.contract.spec import BASIC_GROUPS, GROUPS, RunSpec, list_named, run_keys
from app.events import NodeSnapshot
from app.flows import new_run_answers
from app.flows.new_run_problems import find_problems
from app.planning.advice.changes import apply_change
from app.runfile.advice import advise
from app.runs.placement import keep_listed, place_ranks
from app.text import count_of, show_list

LOOKING_FOR_NODES = "Looking for your nodes\u2026"
"""Words while the nodes are not known yet, which does not mean that there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    severity: Literal["error", "warning", "waiting"]
    """`waiting`: nothing is wrong, but the run cannot start before something is known."""
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReview:
    """Result of checking the answers."""

    findings: Mapping[str, Finding] = field(default_factory=dict)
    """Key -> its problem."""
    asked: frozenset[str] = frozenset()
    """Keys that apply, given the other answers."""
    changed: frozenset[str] = frozenset()
    """Collapsed keys whose answers differ from their defaults."""
    spec: RunSpec | None = None
    """Spec of the run; None while there is an error."""
    summary: tuple[tuple[str, str], ...] = ()
    """Facts and consequences of the answers, each as (label, value)."""

    def is_error(self, key: str) -> bool:
        """Return whether the answer of a field keeps the run from starting."""
        return key in self.findings and self.findings[key].severity != "warning"


def list_questions(*, advanced: bool) -> tuple[RunKey, ...]:
    """Return the keys that the form asks for, in its order; `advanced`: the collapsed ones."""
    keys = [k for k in run_keys().values() if (k.about.group not in BASIC_GROUPS) == advanced]
    ordered = [key for key in keys if not key.about.after]
    for key in keys:
        if key.about.after:
            names = [one.name for one in ordered]
            ordered.insert(names.index(key.about.after) + 1, key)
    return tuple(sorted(ordered, key=lambda key: GROUPS.index(key.about.group)))


def review(
    answers: new_run_answers.RunAnswers,
    nodes: tuple[NodeSnapshot, ...],
    missing: Mapping[str, str] = MappingProxyType({}),
    *,
    are_known: bool = True,
) -> RunReview:
    """Check every answer and describe the run it would start.

    Args:
        answers: current answers.
        nodes: nodes of the cluster.
        missing: key -> reason why its path cannot be used, as last checked. Only a warning:
            the file may appear before the start, which checks again.
        are_known: whether `nodes` were read already; no node may just be one not read yet.
    """
    findings: dict[str, Finding] = {}
    for key, problem in find_problems(answers):
        # Here and below the first finding of a field stays: errors come first, so that no
        # warning hides one.
        findings.setdefault(key, Finding(severity="error", text=problem))
    node_problem = _check_nodes(answers, nodes) if are_known else _WAITING
    if node_problem is not None:
        findings.setdefault("nodes", node_problem)
    devices = find_devices(answers, nodes)
    # Only readable shares can be counted.
    if "shares" not in findings and (problem := _check_shares(answers, devices)):
        findings["shares"] = Finding(severity="error", text=problem)
    failed = any(finding.severity != "warning" for finding in findings.values())
    there = [(key.partition("[")[0], text) for key, text in missing.items()]
    for key, text in (*there, *_advice(answers, devices)):
        findings.setdefault(key, Finding(severity="warning", text=text))
    return RunReview(
        findings=findings,
        asked=frozenset(
            k.name for k in run_keys().values() if new_run_answers.is_asked(k, answers)
        ),
        changed=_changed(answers),
        spec=None if failed else new_run_answers.to_spec(answers),
        summary=_summary(answers, nodes, findings),
    )


def name_paths(answers: new_run_answers.RunAnswers) -> dict[str, str]:
    """Return the model and data that the answers name: key -> path or hub id.

    >>> name_paths({**new_run_answers.usual_answers(), "model": " m ", "data.train": "t.jsonl"})
    {'model': 'm', 'data.train': 't.jsonl'}
    """
    paths = [key.name for key in run_keys().values() if key.about.names in ("file", "folder")]
    found = {key: answers[key].strip() for key in paths if answers[key].strip()}
    with contextlib.suppress(ValueError):
        more = new_run_answers.read_sources(answers["data.sources"])[1:]
        found |= {f"data.sources[{place}]": one.path for place, one in enumerate(more, start=1)}
    with contextlib.suppress(ValueError):
        if parse_held_out(answers["data.eval"]) is not None:
            del found["data.eval"]
    return found


def preview_spec(answers: new_run_answers.RunAnswers) -> RunSpec | None:
    """Return a spec that suffices for a data preview; None while something is missing."""
    asked = [key for key in answers if key.startswith("data.")]
    asked += ["model", "objective", "sequence_tokens", "packing", "nodes"]
    # All other answers keep their defaults, so that a mistake there does not block a preview.
    chosen = {**new_run_answers.usual_answers(), **{key: answers[key] for key in asked}}
    return None if find_problems(chosen) else new_run_answers.to_spec(chosen)


def plan_spec(
    answers: new_run_answers.RunAnswers, nodes: tuple[NodeSnapshot, ...], *, are_known: bool = True
) -> tuple[RunSpec | None, str]:
    """Return a spec that suffices for a plan; None and the reason while something is missing."""
    if not answers["model"].strip():
        return None, "Choose a model to see its plan."
    if not are_known:
        return None, LOOKING_FOR_NODES
    if not nodes:
        return None, "Add a node to see the plan."
    named = _named(answers)
    if find_problems(named):
        return None, "Correct the marked fields to see the plan."
    if answers["nodes"] != new_run_answers.ALL_NODES and not chosen_nodes(answers, nodes):
        return None, "Choose at least one node to see the plan."
    return new_run_answers.to_spec(named), ""


def take_advice(
    answers: new_run_answers.RunAnswers, change: Mapping[str, object]
) -> new_run_answers.RunAnswers:
    """Return the answers after following a plan's advice.

    >>> answers = {**new_run_answers.usual_answers(), "model": "m"}
    >>> take_advice(answers, {"sequence_tokens": 1024, "adapter.kind": "qlora"})["adapter.kind"]
    'qlora'
    """
    # The answers may lack a name or data; placeholders make them a valid spec.
    advised = new_run_answers.to_answers(
        apply_change(new_run_answers.to_spec(_named(answers)), change)
    )
    return {**answers, **{key: advised[key] for key in change}}


def _named(answers: new_run_answers.RunAnswers) -> new_run_answers.RunAnswers:
    """Return the answers with placeholders for a missing name or data."""
    named = {"name": answers["name"].strip() or "-"}
    return {**answers, **named, "data.train": answers["data.train"].strip() or "the data"}


def usable_nodes(nodes: tuple[NodeSnapshot, ...]) -> tuple[NodeSnapshot, ...]:
    """Return the nodes that can start a run now."""
    return tuple(node for node in nodes if node.state == "online")


def chosen_nodes(
    answers: new_run_answers.RunAnswers, nodes: tuple[NodeSnapshot, ...]
) -> tuple[NodeSnapshot, ...]:
    """Return the snapshots of the nodes that would train."""
    if answers["nodes"] == new_run_answers.ALL_NODES:
        return nodes
    names = new_run_answers.split_names(answers["nodes"])
    return tuple(node for node in nodes if node.name in list_named(names))


def find_devices(
    answers: new_run_answers.RunAnswers, nodes: tuple[NodeSnapshot, ...]
) -> tuple[str, ...]:
    """Return the device of each rank, such as `cuda:0`; empty while not known."""
    facts: dict[str, NodeFacts] = {}
    is_all = answers["nodes"] == new_run_answers.ALL_NODES
    for node in chosen_nodes(answers, nodes):
        if is_all and node.state not in ("online", "connecting"):
            continue  # a start does without it
        # Without its facts the number of its ranks is unknown, and so is the total.
        if node.facts is None:
            return ()
        facts[node.name] = node.facts
    entries = new_run_answers.split_names(answers["nodes"])
    ranks = keep_listed(place_ranks(facts), "all" if is_all else entries)
    if find_mode(answers["parallel"]).uses_one_gpu:
        ranks = ranks[:1]  # any: how many there are is what matters
    return tuple(place.device for place in ranks)


def describe_devices(nodes: tuple[NodeSnapshot, ...]) -> str:
    """Describe the devices that train on `nodes`, such as `2 GPUs and 1 CPU`."""
    facts = [node.facts for node in nodes if node.facts is not None]
    num_gpus = sum(len(fact.gpus) for fact in facts)
    num_cpus = sum(not fact.gpus for fact in facts)
    parts = [
        count_of(number, noun) for number, noun in ((num_gpus, "GPU"), (num_cpus, "CPU")) if number
    ]
    return show_list(parts) if parts else "not known yet"


# ---------------------------------------------------------------- what is wrong


_WAITING = Finding(severity="waiting", text=LOOKING_FOR_NODES)


def _check_nodes(
    answers: new_run_answers.RunAnswers, nodes: tuple[NodeSnapshot, ...]
) -> Finding | None:
    if not nodes:
        return Finding(severity="error", text="No nodes yet. Add this PC or another one.")
    connecting = [node.name for node in chosen_nodes(answers, nodes) if node.state == "connecting"]
    if connecting:
        return Finding(severity="waiting", text=f"Connecting to {show_list(connecting)}\u2026")
    if answers["nodes"] == new_run_answers.ALL_NODES:
        if not usable_nodes(nodes):
            return Finding(severity="error", text="No node is online.")
        # A PC that is off is left out; one that refuses the connection wants the user's decision.
        refusing = [one.name for one in nodes if one.state not in ("online", "unreachable")]
        if refusing:
            text = f"{show_list(refusing)} cannot be reached now: untick it, or repair it first."
            return Finding(severity="error", text=text)
        lost = [node.name for node in nodes if node.state != "online"]
        if lost:
            it = "it" if len(lost) == 1 else "them"
            text = f"{show_list(lost)} cannot be reached now: the run starts without {it}."
            return Finding(severity="warning", text=text)
        return None
    chosen = new_run_answers.split_names(answers["nodes"])
    if not chosen:
        return Finding(severity="error", text="Choose at least one node.")
    states = {node.name: node.state for node in nodes}
    chosen = list_named(chosen)
    unknown = [name for name in chosen if name not in states]
    if unknown:
        return Finding(severity="error", text=f"No node is named {show_list(unknown)}.")
    lost = [name for name in chosen if states[name] != "online"]
    if lost:
        return Finding(severity="error", text=f"{show_list(lost)} cannot be reached now.")
    return None


def _check_shares(answers: new_run_answers.RunAnswers, devices: tuple[str, ...]) -> str:
    num_shares = len(new_run_answers.split_names(answers["shares"]))
    if not num_shares or not devices or num_shares == len(devices):
        return ""
    ranks = count_of(len(devices), "device")
    return f"{count_of(num_shares, 'share')} for {ranks}: enter one for each, or leave it empty."


def _advice(answers: new_run_answers.RunAnswers, devices: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return (key, advice), even while the model is not chosen yet."""
    whole = {**_named(answers), "model": answers["model"].strip() or "-"}
    if find_problems(whole):
        return []
    return [(a.key, a.text) for a in advise(new_run_answers.to_spec(whole), devices)]


def _changed(answers: new_run_answers.RunAnswers) -> frozenset[str]:
    usual, proposed = new_run_answers.usual_answers(), new_run_answers.proposed_answers()
    return frozenset(
        key.name
        for key in list_questions(advanced=True)
        if new_run_answers.is_asked(key, answers)
        and answers[key.name].strip() not in (usual[key.name], proposed[key.name])
    )


# ---------------------------------------------------------------- what follows


def _say_held_out(text: str) -> str:
    """Return the part of the training data that is held out; empty: none.

    >>> _say_held_out("auto"), _say_held_out("0.05"), _say_held_out("200"), _say_held_out("a.csv")
    ('on 2 % of the rows, at most 200', 'on 5 % of the rows', 'on 200 rows', '')
    """
    try:
        part = parse_held_out(text)
    except ValueError:
        return ""
    if part is None:
        return ""
    if part.share is None:
        return f"on {count_of(part.most or 0, 'row')}"
    most = f", at most {part.most}" if part.most is not None else ""
    return f"on {part.share * 100:g} % of the rows{most}"


def _summary(
    answers: new_run_answers.RunAnswers,
    nodes: tuple[NodeSnapshot, ...],
    findings: Mapping[str, Finding],
) -> tuple[tuple[str, str], ...]:
    chosen = chosen_nodes(answers, nodes)
    is_waiting = "nodes" in findings and findings["nodes"].severity == "waiting"
    no_nodes = "not known yet" if is_waiting else "none chosen"
    held_out = _say_held_out(answers["data.eval"])
    rows = [
        ("Nodes", show_list([node.name for node in chosen]) if chosen else no_nodes),
        ("Devices", describe_devices(chosen)),
        *([("Evaluation", held_out)] if held_out else []),
    ]
    if "batch_sequences" not in findings and "sequence_tokens" not in findings:
        tokens = new_run_answers.read_whole(
            answers["batch_sequences"]
        ) * new_run_answers.read_whole(answers["sequence_tokens"])
        tokens *= OBJECTIVES[answers["objective"]].num_segments
        rows.append(("Tokens per step", f"up to {tokens:,}"))
    if "shares" not in findings:
        rows.append(("Shares", answers["shares"].strip() or "measured when the run starts"))
    if "max_steps" not in findings and answers["max_steps"].strip():
        rows.append(
            ("Ends after", f"{new_run_answers.read_whole(answers['max_steps']):,} steps at most")
        )
    elif "epochs" not in findings:
        epochs = answers["epochs"].strip()
        rows.append(("Ends after", f"{epochs} epoch{'' if epochs == '1' else 's'}"))
    return tuple(rows)
