"""New run: what is asked, what each answer means, what is wrong with it, and the RunSpec it makes.

Answers are the texts as typed, so that half a number is an answer too and nothing a person wrote
is lost. Nothing is asked that can be found out: nodes come from the cluster, shares of a batch are
measured at the start. The questions themselves are in new_run_fields.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from agents.spec import AdapterKind, AdapterSpec, CheckpointSpec, DataFormat, DataSpec, RunSpec
from app.events import NodeSnapshot
from app.text import count_of, show_list

ALL_NODES = "all"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """One text per field, as typed."""

    name: str = "my-run"
    model: str = ""
    train: str = ""
    eval: str = ""
    format: str = "auto"
    adapter: str = "lora"
    rank: str = "16"
    alpha: str = "32"
    dropout: str = "0.05"
    targets: str = "all-linear"
    sequence_tokens: str = "2048"
    batch_sequences: str = "24"
    epochs: str = "3"
    max_steps: str = ""
    learning_rate: str = "2e-4"
    nodes: str = ALL_NODES
    """`all`, or names with commas between."""
    every_minutes: str = "10"
    every_steps: str = ""
    keep: str = "3"
    copies: str = "2"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    severity: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """What the answers come to."""

    findings: Mapping[str, Finding] = field(default_factory=dict)
    """Field key -> what is wrong with it."""
    spec: RunSpec | None = None
    """None while an error stands."""
    summary: tuple[tuple[str, str], ...] = ()
    """(label, value): what was found out and what follows from the answers."""


def review(answers: Answers, nodes: tuple[NodeSnapshot, ...]) -> Review:
    """Check every answer, and say what would happen."""
    findings: dict[str, Finding] = {}
    for key, problem in _problems(answers):
        findings.setdefault(key, Finding(severity="error", text=problem))
    node_problem = _check_nodes(answers, nodes)
    if node_problem is not None:
        findings.setdefault("nodes", node_problem)
    for key, advice in _advice(answers, findings):
        findings.setdefault(key, Finding(severity="warning", text=advice))
    failed = any(finding.severity == "error" for finding in findings.values())
    return Review(
        findings=findings,
        spec=None if failed else to_spec(answers),
        summary=_summary(answers, nodes, findings),
    )


def to_spec(answers: Answers) -> RunSpec:
    """Turn answers without errors into the spec.

    Raises:
        ValueError: an answer is not usable; `review` names it before it comes to this.
    """
    return RunSpec(
        name=answers.name.strip(),
        model=answers.model.strip(),
        data=DataSpec(
            train=answers.train.strip(),
            eval=answers.eval.strip() or None,
            format=cast(DataFormat, answers.format),
        ),
        adapter=_adapter(answers),
        sequence_tokens=_whole(answers.sequence_tokens),
        batch_sequences=_whole(answers.batch_sequences),
        epochs=_decimal(answers.epochs),
        max_steps=_whole(answers.max_steps) if answers.max_steps.strip() else None,
        learning_rate=_decimal(answers.learning_rate),
        nodes="all" if answers.nodes == ALL_NODES else split_names(answers.nodes),
        checkpoint=CheckpointSpec(
            every_minutes=_decimal(answers.every_minutes)
            if answers.every_minutes.strip()
            else None,
            every_steps=_whole(answers.every_steps) if answers.every_steps.strip() else None,
            keep=_whole(answers.keep),
            copies=_whole(answers.copies),
        ),
    )


def apply_answers(base: RunSpec, answers: Answers) -> RunSpec:
    """Return `base`, a run file that was opened, with the answers over it.

    What the dialog does not ask (schedule, seed, precision, ...) stays as the file has it.
    """
    asked = to_spec(answers)
    return replace(
        base,
        **{
            name: getattr(asked, name)
            for name in (
                "name",
                "model",
                "data",
                "adapter",
                "sequence_tokens",
                "batch_sequences",
                "epochs",
                "max_steps",
                "learning_rate",
                "nodes",
                "checkpoint",
            )
        },
    )


def to_answers(spec: RunSpec) -> Answers:
    """Return the answers that make `spec`; for a run file that is opened."""
    targets = spec.adapter.targets
    return Answers(
        name=spec.name,
        model=spec.model,
        train=spec.data.train,
        eval=spec.data.eval or "",
        format=spec.data.format,
        adapter=spec.adapter.kind,
        rank=str(spec.adapter.rank),
        alpha=f"{spec.adapter.alpha:g}",
        dropout=f"{spec.adapter.dropout:g}",
        targets=targets if isinstance(targets, str) else ", ".join(targets),
        sequence_tokens=str(spec.sequence_tokens),
        batch_sequences=str(spec.batch_sequences),
        epochs=f"{spec.epochs:g}",
        max_steps="" if spec.max_steps is None else str(spec.max_steps),
        learning_rate=f"{spec.learning_rate:g}",
        nodes=ALL_NODES if spec.nodes == ALL_NODES else ", ".join(spec.nodes),
        every_minutes=_shown(spec.checkpoint.every_minutes),
        every_steps=_shown(spec.checkpoint.every_steps),
        keep=str(spec.checkpoint.keep),
        copies=str(spec.checkpoint.copies),
    )


def split_names(text: str) -> tuple[str, ...]:
    """Return the names in a text with commas between them."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def usable_nodes(nodes: tuple[NodeSnapshot, ...]) -> tuple[NodeSnapshot, ...]:
    """Return the nodes that can start a run now."""
    return tuple(node for node in nodes if node.state == "online")


# ---------------------------------------------------------------- numbers as typed


def _whole(text: str) -> int:
    try:
        return int(text.strip().replace(",", "").replace("_", "").replace(" ", ""))
    except ValueError:
        raise ValueError(f"'{text.strip()}' is not a whole number") from None


def _decimal(text: str) -> float:
    try:
        value = float(text.strip().replace(",", "."))
    except ValueError:
        raise ValueError(f"'{text.strip()}' is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"'{text.strip()}' is not a number that can be used")
    return value


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _adapter(answers: Answers) -> AdapterSpec:
    if answers.adapter == "full":  # the other answers were not asked then
        return AdapterSpec(kind="full")
    return AdapterSpec(
        kind=cast(AdapterKind, answers.adapter),
        rank=_whole(answers.rank),
        alpha=_decimal(answers.alpha),
        dropout=_decimal(answers.dropout),
        targets=_targets(answers.targets),
    )


def _targets(text: str) -> str | tuple[str, ...]:
    names = split_names(text)
    return names[0] if names == ("all-linear",) else names


# ---------------------------------------------------------------- what is wrong


def _problems(answers: Answers) -> list[tuple[str, str]]:
    found = [
        *_missing(answers),
        *_number(answers, "sequence_tokens", _whole, low=8),
        *_number(answers, "batch_sequences", _whole, low=1),
        *_number(answers, "epochs", _decimal, above=0),
        *_number(answers, "max_steps", _whole, low=1, optional=True),
        *_number(answers, "learning_rate", _decimal, above=0),
        *_number(answers, "every_minutes", _decimal, above=0, optional=True),
        *_number(answers, "every_steps", _whole, low=1, optional=True),
        *_number(answers, "keep", _whole, low=1),
        *_number(answers, "copies", _whole, low=1),
    ]
    if answers.adapter != "full":
        found += [
            *_number(answers, "rank", _whole, low=1),
            *_number(answers, "alpha", _decimal, above=0),
            *_number(answers, "dropout", _decimal, low=0, below=1),
        ]
        if not split_names(answers.targets):
            found.append(("targets", "Write all-linear, or the names of some layers."))
    return found


def _missing(answers: Answers) -> list[tuple[str, str]]:
    found = []
    if not answers.name.strip():
        found.append(("name", "Give the run a name."))
    if not answers.model.strip():
        found.append(("model", "Choose a folder with a model, or write a Hugging Face id."))
    if not answers.train.strip():
        found.append(("train", "Choose a file with training rows."))
    return found


def _number(
    answers: Answers,
    key: str,
    read: Callable[[str], float],
    *,
    low: float | None = None,
    above: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> list[tuple[str, str]]:
    text: str = getattr(answers, key)
    if not text.strip():
        return [] if optional else [(key, "A number is needed here.")]
    try:
        value = read(text)
    except ValueError as error:
        return [(key, f"{error}.")]
    if low is not None and value < low:
        return [(key, f"{value:g} is too small; the least is {low:g}.")]
    if above is not None and value <= above:
        return [(key, f"{value:g} is too small; it must be above {above:g}.")]
    if below is not None and value >= below:
        return [(key, f"{value:g} is too large; it must be below {below:g}.")]
    return []


def _check_nodes(answers: Answers, nodes: tuple[NodeSnapshot, ...]) -> Finding | None:
    if not nodes:
        return Finding(severity="error", text="There is no node yet: add this PC or another one.")
    if answers.nodes == ALL_NODES:
        if not usable_nodes(nodes):
            return Finding(severity="error", text="No node is online at the moment.")
        lost = [node.name for node in nodes if node.state != "online"]
        if lost:
            text = f"{show_list(lost)} cannot be reached now; 'all' waits for every node."
            return Finding(severity="error", text=text)
        return None
    chosen = split_names(answers.nodes)
    if not chosen:
        return Finding(severity="error", text="Choose at least one node.")
    states = {node.name: node.state for node in nodes}
    unknown = [name for name in chosen if name not in states]
    if unknown:
        return Finding(severity="error", text=f"There is no node called {show_list(unknown)}.")
    lost = [name for name in chosen if states[name] != "online"]
    if lost:
        return Finding(severity="error", text=f"{show_list(lost)} cannot be reached now.")
    return None


def _advice(answers: Answers, findings: Mapping[str, Finding]) -> list[tuple[str, str]]:
    advice = []
    if "learning_rate" not in findings and _decimal(answers.learning_rate) > 0.01:
        advice.append(("learning_rate", "Unusually high: most runs diverge above 0.01."))
    if not answers.every_minutes.strip() and not answers.every_steps.strip():
        advice.append(("every_minutes", "Without periodic checkpoints a power cut loses the run."))
    return advice


# ---------------------------------------------------------------- what follows


def chosen_nodes(answers: Answers, nodes: tuple[NodeSnapshot, ...]) -> tuple[NodeSnapshot, ...]:
    """Return the snapshots of the nodes that would train."""
    if answers.nodes == ALL_NODES:
        return nodes
    names = split_names(answers.nodes)
    return tuple(node for node in nodes if node.name in names)


def describe_devices(nodes: tuple[NodeSnapshot, ...]) -> str:
    """Return what trains on `nodes`, such as `2 GPUs and 1 CPU`."""
    facts = [node.facts for node in nodes if node.facts is not None]
    num_gpus = sum(len(fact.gpus) for fact in facts)
    num_cpus = sum(not fact.gpus for fact in facts)
    parts = [
        count_of(number, noun) for number, noun in ((num_gpus, "GPU"), (num_cpus, "CPU")) if number
    ]
    return show_list(parts) if parts else "not known yet"


def _summary(
    answers: Answers, nodes: tuple[NodeSnapshot, ...], findings: Mapping[str, Finding]
) -> tuple[tuple[str, str], ...]:
    chosen = chosen_nodes(answers, nodes)
    rows = [
        ("Nodes", show_list([node.name for node in chosen]) if chosen else "none chosen"),
        ("Devices", describe_devices(chosen)),
    ]
    if "batch_sequences" not in findings and "sequence_tokens" not in findings:
        tokens = _whole(answers.batch_sequences) * _whole(answers.sequence_tokens)
        rows.append(("Tokens per step", f"up to {tokens:,}"))
    rows.append(("Shares", "measured at the start"))
    if "max_steps" not in findings and answers.max_steps.strip():
        rows.append(("Ends after", f"{_whole(answers.max_steps):,} steps at the latest"))
    elif "epochs" not in findings:
        rows.append(("Ends after", f"{answers.epochs.strip()} epochs"))
    return tuple(rows)
