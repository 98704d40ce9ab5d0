"""The answers of the New run dialog, and their lossless conversion to a RunSpec and back.

Answers are texts as typed, so that an unfinished number is an answer too and no input is lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar, cast

from agents.contract.objectives import has_key
from agents.contract.spec import PATTERN_SIGNS, AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from app.flows.field import NO, YES
from app.text import shorten, show_exponent

Read = TypeVar("Read")
ALL_NODES = "all"
MOST_REPEATED = 20
"""Maximum length of an answer that a message quotes, in characters."""
# Digits, in one piece or in groups of three.
_WHOLE = re.compile(r"[+-]?(\d+|\d{1,3}([ ,_]\d{3})+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAnswers:
    """One text per field, as typed; `true` or `false` for a checkbox."""

    name: str = "my-run"
    model: str = ""
    train: str = ""
    objective: str = "sft"
    adapter: str = "lora"
    rank: str = "16"
    alpha: str = "32"
    dpo_beta: str = "0.1"
    sequence_tokens: str = "2048"
    batch_sequences: str = "24"
    epochs: str = "3"
    learning_rate: str = "2e-4"
    packing: str = NO
    nodes: str = ALL_NODES
    """`all`, or node names separated by commas."""
    eval: str = ""
    evaluate_every_steps: str = ""
    format: str = "auto"
    ignore_columns: str = ""
    """Columns to read the data without, separated by commas."""
    targets: str = "all-linear"
    dropout: str = "0.05"
    rslora: str = NO
    dora: str = NO
    experts: str = NO
    optimizer: str = "adamw"
    schedule: str = "cosine"
    warmup_share: str = "0.03"
    max_gradient_norm: str = "1"
    weight_decay: str = "0"
    max_steps: str = ""
    seed: str = "42"
    precision: str = "auto"
    recompute: str = "auto"
    compile: str = "auto"
    memory_gib: str = ""
    exact: str = YES
    parallel: str = "auto"
    rebalance: str = YES
    shares: str = ""
    """Shares, one number per rank, separated by commas; empty: measured."""
    compression: str = "none"
    activation_bits: str = "16"
    every_minutes: str = "10"
    every_steps: str = ""
    keep: str = "3"
    copies: str = "2"
    recovery: str = "auto"
    rejoin: str = "auto"
    divergence: str = "wait"


def to_spec(answers: RunAnswers) -> RunSpec:
    """Convert answers to a spec.

    Raises:
        ValueError: an answer is not usable, or two contradict each other.
    """
    # Choices are checked where a spec is read; here they come from the dialog's own lists.
    return RunSpec(
        name=answers.name.strip(),
        model=answers.model.strip(),
        data=DataSpec(
            train=answers.train.strip(),
            eval=answers.eval.strip() or None,
            format=cast(Any, answers.format),
            ignore_columns=split_names(answers.ignore_columns),
        ),
        objective=cast(Any, answers.objective),
        dpo_beta=_beta(answers),
        adapter=_adapter(answers),
        sequence_tokens=read_whole(answers.sequence_tokens),
        packing=answers.packing == YES,
        batch_sequences=read_whole(answers.batch_sequences),
        epochs=read_decimal(answers.epochs),
        max_steps=_optional(answers.max_steps, read_whole),
        learning_rate=read_decimal(answers.learning_rate),
        schedule=cast(Any, answers.schedule),
        warmup_share=read_decimal(answers.warmup_share),
        weight_decay=read_decimal(answers.weight_decay),
        max_gradient_norm=read_decimal(answers.max_gradient_norm),
        optimizer=cast(Any, answers.optimizer),
        precision=cast(Any, answers.precision),
        recompute=cast(Any, answers.recompute),
        compile=cast(Any, answers.compile),
        exact=answers.exact == YES,
        memory_gib=_optional(answers.memory_gib, read_decimal),
        seed=read_whole(answers.seed),
        nodes="all" if answers.nodes == ALL_NODES else split_names(answers.nodes),
        parallel=cast(Any, answers.parallel),
        shares=_optional(answers.shares, read_shares),
        rebalance=answers.rebalance == YES,
        compression=cast(Any, answers.compression),
        activation_bits=cast(Any, int(answers.activation_bits)),
        evaluate_every_steps=_optional(answers.evaluate_every_steps, read_whole),
        checkpoint=CheckpointSpec(
            every_minutes=_optional(answers.every_minutes, read_decimal),
            every_steps=_optional(answers.every_steps, read_whole),
            keep=read_whole(answers.keep),
            copies=read_whole(answers.copies),
        ),
        recovery=cast(Any, answers.recovery),
        rejoin=cast(Any, answers.rejoin),
        divergence=cast(Any, answers.divergence),
    )


def to_answers(spec: RunSpec) -> RunAnswers:
    """Convert a spec to answers, for an opened run file or a repeated run."""
    adapter, saving = spec.adapter, spec.checkpoint
    targets = adapter.targets
    return RunAnswers(
        name=spec.name,
        model=spec.model,
        train=spec.data.train,
        objective=spec.objective,
        adapter=adapter.kind,
        rank=str(adapter.rank),
        alpha=_shown(adapter.alpha),
        dpo_beta=_shown(spec.dpo_beta),
        sequence_tokens=str(spec.sequence_tokens),
        batch_sequences=str(spec.batch_sequences),
        epochs=_shown(spec.epochs),
        learning_rate=_shown(spec.learning_rate),
        packing=_tick(spec.packing),
        nodes=ALL_NODES if spec.nodes == ALL_NODES else ", ".join(spec.nodes),
        eval=spec.data.eval or "",
        evaluate_every_steps=_shown(spec.evaluate_every_steps),
        format=spec.data.format,
        ignore_columns=", ".join(spec.data.ignore_columns),
        targets=targets if isinstance(targets, str) else ", ".join(targets),
        dropout=_shown(adapter.dropout),
        rslora=_tick(adapter.rslora),
        dora=_tick(adapter.dora),
        experts=_tick(adapter.experts),
        optimizer=spec.optimizer,
        schedule=spec.schedule,
        warmup_share=_shown(spec.warmup_share),
        max_gradient_norm=_shown(spec.max_gradient_norm),
        weight_decay=_shown(spec.weight_decay),
        max_steps=_shown(spec.max_steps),
        seed=str(spec.seed),
        precision=spec.precision,
        recompute=spec.recompute,
        compile=spec.compile,
        exact=_tick(spec.exact),
        memory_gib=_shown(spec.memory_gib),
        parallel=spec.parallel,
        rebalance=_tick(spec.rebalance),
        shares="" if spec.shares is None else ", ".join(map(_shown, spec.shares)),
        compression=spec.compression,
        activation_bits=str(spec.activation_bits),
        every_minutes=_shown(saving.every_minutes),
        every_steps=_shown(saving.every_steps),
        keep=str(saving.keep),
        copies=str(saving.copies),
        recovery=spec.recovery,
        rejoin=spec.rejoin,
        divergence=spec.divergence,
    )


def use_recipe(answers: RunAnswers, recipe: RunSpec) -> RunAnswers:
    """Return the answers of a recipe, with name, model, data and nodes of `answers`."""
    # A recipe brings settings; its own model and data are only those it was saved with.
    kept = ("name", "model", "train", "eval", "nodes")
    return replace(to_answers(recipe), **{key: getattr(answers, key) for key in kept})


# ---------------------------------------------------------------- texts as typed


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated text into names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def repeat(text: str) -> str:
    """Shorten an answer to quote it in a message."""
    return shorten(text, MOST_REPEATED)


def read_whole(text: str) -> int:
    """Read a whole number, such as `1024`, `1,024` or `1 024`, but not `1,5`.

    Raises:
        ValueError: the text is not a whole number.
    """
    try:
        if not _WHOLE.fullmatch(text.strip()):
            raise ValueError(text)
        return int(re.sub("[ ,_]", "", text))
    except ValueError:  # of `int`, too: a text of thousands of digits
        raise ValueError(f"'{repeat(text)}' is not a whole number") from None


def read_decimal(text: str) -> float:
    """Read a finite number, with a decimal point or comma.

    Raises:
        ValueError: the text is not a finite number.
    """
    try:
        value = float(text.strip().replace(",", "."))
    except ValueError:
        raise ValueError(f"'{repeat(text)}' is not a number") from None
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(f"'{repeat(text)}' is not a finite number")
    return value


def read_shares(text: str) -> tuple[float, ...]:
    """Split a comma-separated text into numbers.

    Raises:
        ValueError: one of them is not a number.
    """
    return tuple(read_decimal(name) for name in split_names(text))


def read_targets(text: str) -> str | tuple[str, ...]:
    """Return `all-linear`, a pattern, or the names in a comma-separated text."""
    # A regular expression may contain commas, so it is never split.
    if PATTERN_SIGNS.intersection(text):
        return text.strip()
    names = split_names(text)
    return names[0] if names == ("all-linear",) else names


def _optional(text: str, read: Callable[[str], Read]) -> Read | None:
    return read(text) if text.strip() else None


def _shown(value: float | None) -> str:
    """Return a number as a person would write it, without losing precision.

    >>> _shown(2e-4), _shown(0.05), _shown(3.0)
    ('2e-4', '0.05', '3')
    """
    if value is None:
        return ""
    # `g` keeps six digits; a value with more is shown in full below.
    short = f"{value:g}"
    if 0 < abs(value) < 0.001:
        short = show_exponent(value, digits=6)
    return short if float(short) == value else str(value)


def _tick(value: bool) -> str:
    return YES if value else NO


def _beta(answers: RunAnswers) -> float:
    """Return beta, or its default if the objective has none."""
    try:
        value = read_decimal(answers.dpo_beta)
    except ValueError:
        value = 0.0
    # Unused without DPO: kept if usable, so that a run file comes back as it was; else it
    # must not fail a run that never reads it.
    if value > 0 or has_key(answers.objective, "dpo_beta"):
        return value
    return read_decimal(RunAnswers().dpo_beta)


def _adapter(answers: RunAnswers) -> AdapterSpec:
    kind = cast(Any, answers.adapter)
    if answers.adapter != "full":
        return AdapterSpec(
            kind=kind,
            rank=read_whole(answers.rank),
            alpha=read_decimal(answers.alpha),
            dropout=read_decimal(answers.dropout),
            targets=read_targets(answers.targets),
            rslora=answers.rslora == YES,
            dora=answers.dora == YES,
            experts=answers.experts == YES,
        )
    try:  # not asked, so of no effect: kept if usable, so that a run file comes back as it was
        return AdapterSpec(
            kind=kind,
            rank=read_whole(answers.rank),
            alpha=read_decimal(answers.alpha),
            dropout=read_decimal(answers.dropout),
            targets=read_targets(answers.targets),
        )
    except ValueError:
        return AdapterSpec(kind=kind)


def to_draft(answers: RunAnswers, untouched: RunAnswers) -> dict[str, str]:
    """Return the answers of an abandoned form that differ from its initial ones.

    >>> to_draft(RunAnswers(name="a", rank="8"), RunAnswers(name="a"))
    {'rank': '8'}
    """
    plain, before = asdict(answers), asdict(untouched)
    return {key: value for key, value in plain.items() if value != before[key]}


def take_up(draft: Mapping[str, object], untouched: RunAnswers) -> RunAnswers:
    """Return the answers of a draft; keys without a question in this version are left out.

    >>> take_up({"rank": "8", "gone": "1", "alpha": 3}, RunAnswers(name="a")).rank
    '8'
    """
    # Drafts are stored between versions, and an old one may have other fields or types.
    known = {one.name for one in fields(RunAnswers)}
    kept = {key: text for key, text in draft.items() if key in known and isinstance(text, str)}
    return replace(untouched, **kept)
