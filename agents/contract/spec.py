"""RunSpec: what a user asks for. One value is planned, stored, sent and kept in the checkpoint.

Plain dataclasses, because nodes have only the standard library. The app reads run files into them
through pydantic, a node through `agents.contract.wire`. Defaults are those of a run file that sets
only `model` and `data`. Limits are checked here and nowhere else; every message names the field,
its value and the limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from agents.contract.objectives import OBJECTIVES, DataFormat, Objective, join_or, refuse_format
from agents.contract.parallel import ParallelMode, find_mode

AdapterKind = Literal["lora", "qlora", "full"]
OptimizerKind = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
Parallel = Literal["auto", ParallelMode]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
Recompute = Literal["auto", "none", "all"]
Compression = Literal["none", "bf16", "powersgd"]
ActivationBits = Literal[8, 16]
MAX_SEED = 2**63 - 1
"""Maximum seed, which every random number generator of the trainer accepts."""
MAX_COUNT = 10**15
"""Maximum of every other count. Far beyond any use, so that no arithmetic of a plan overflows."""
MOST: dict[str, float] = {
    "adapter.rank": 32_768,
    "adapter.alpha": 1_000_000,
    "dpo_beta": 1_000,
    "sequence_tokens": 10_000_000,
    "batch_sequences": 1_000_000,
    "epochs": 1_000_000,
    "learning_rate": 1,
    "weight_decay": 10,
    "memory_gib": MAX_COUNT,
}
"""Largest value of a number by its key; beyond it no run can learn anything."""
MAX_PATTERN = 400
"""Maximum length of a regular expression in `targets`, in characters."""
MAX_REPEATS = 4
"""Maximum number of repeats in it: each one multiplies the time by the length of a name."""
# A group that repeats can take exponential time: a stranger's run file could stop the window.
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")


def _at_least(name: str, value: float, limit: float) -> None:
    if value < limit:
        raise ValueError(f"{name} is {_shown(value)}; it must be at least {limit}")


def _at_most(name: str, value: float, limit: float, reason: str = "") -> None:
    if value > limit:
        raise ValueError(f"{name} is {_shown(value)}; it must be at most {limit:,}{reason}")


def _shown(value: float) -> str:
    # The text of a longer number would fill the screen, and Python refuses one of 5,000 digits.
    is_long = isinstance(value, int) and value.bit_length() > 200
    return "a number of more than 60 digits" if is_long else str(value)


def _is_count(name: str, value: int, minimum: int, section: str = "") -> None:
    _at_least(name, value, minimum)
    _at_most(name, value, MOST.get(section + name, MAX_COUNT))


def _are_finite(spec: Any) -> None:
    """Refuse infinity and not-a-number, which no comparison with a limit catches."""
    for one in fields(spec):
        value = getattr(spec, one.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{one.name} is {number}; it must be a finite number")


def _are_distinct(name: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen or not value.strip():
            what = f"{value!r} twice" if value.strip() else "an empty name"
            raise ValueError(f"{name} has {what}; each must be named once")
        seen.add(value)


def refuse_pattern(pattern: str) -> str:
    """Return why a regular expression is not used, after its key; empty: it is used.

    >>> refuse_pattern(".*(q|v)_proj"), refuse_pattern("(a+)+$")
    ('', "is the pattern '(a+)+$'; it must not repeat a group, which can take for ever")
    """
    if len(pattern) > MAX_PATTERN:
        return f"is a pattern of {len(pattern):,} characters; at most {MAX_PATTERN} are allowed"
    if len(_REPEAT.findall(pattern)) > MAX_REPEATS:
        return f"is the pattern {pattern!r}; it may repeat at most {MAX_REPEATS} times (* + {{}})"
    if _REPEATED_GROUP.search(pattern):
        return f"is the pattern {pattern!r}; it must not repeat a group, which can take for ever"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is the pattern {pattern!r}, which is not a regular expression: {error}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    train: str
    """Path of the training file on the master, or a hub dataset id."""
    eval: str | None = None
    """Path of the evaluation file; None: no evaluation."""
    format: DataFormat = "auto"
    """Layout of a row; `auto` is decided from the first rows."""
    ignore_columns: tuple[str, ...] = ()
    """Columns of rows and keys of messages to read the data without. A column that changes what a
    row means is otherwise refused where it is not trained."""

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("train is empty; it must name a file or a hub dataset")
        if not all(self.ignore_columns):
            raise ValueError("ignore_columns holds an empty name; it must name columns")


PATTERN_SIGNS = frozenset("*^$|()[]\\+?")
"""Characters that make a text of `targets` a regular expression instead of a layer's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    kind: AdapterKind = "lora"
    rank: int = 16
    """Inner dimension r of the two LoRA matrices (Hu et al. 2021, arXiv:2106.09685)."""
    alpha: float = 32.0
    """LoRA scale: the update is multiplied by alpha / rank."""
    dropout: float = 0.05
    """Share of the adapter's inputs that training sets to zero, from 0 to below 1."""
    targets: str | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter: `all-linear`, their names, or a regular expression that
    matches their full names, such as `.*layers[.][01][.].*q_proj`."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv:2312.03732)."""
    dora: bool = False
    """Train magnitude and direction of each weight column separately (Liu et al. 2024,
    arXiv:2402.09353)."""
    experts: bool = False
    """Whether the experts of a mixture get an adapter, too: matrices of their own for each expert,
    in the layout of PEFT's `target_parameters`, which has neither dropout nor DoRA."""

    def __post_init__(self) -> None:
        _are_finite(self)
        _is_count("rank", self.rank, 1, "adapter.")
        if self.alpha <= 0:
            raise ValueError(f"alpha is {self.alpha}; it must be above 0")
        _at_most("alpha", self.alpha, MOST["adapter.alpha"])
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be from 0 to below 1")
        if not self.targets:
            raise ValueError("targets is empty; it must be all-linear, or name at least one layer")
        # One form per meaning: equal specs have to compare and hash equal (frozen, so by object).
        if self.targets == ("all-linear",):
            object.__setattr__(self, "targets", "all-linear")
        # A single name without signs of a pattern means one layer, not a regular expression.
        is_word = isinstance(self.targets, str) and self.targets != "all-linear"
        if is_word and not PATTERN_SIGNS.intersection(self.targets):
            object.__setattr__(self, "targets", (self.targets,))
        if isinstance(self.targets, tuple):
            _are_distinct("targets", self.targets)
        elif refusal := refuse_pattern(self.targets):
            raise ValueError(f"targets {refusal}")
        self._refuse_contradictions()

    def _refuse_contradictions(self) -> None:
        for name in ("rslora", "dora", "experts"):
            if self.kind == "full" and getattr(self, name):
                raise ValueError(f"{name} is true; it must be false with kind full")
        if self.experts and self.dropout:
            raise ValueError(
                f"dropout is {self.dropout}; it must be 0 with experts: true, whose adapters have "
                "none"
            )
        if self.experts and self.dora:
            raise ValueError("dora is true; it must be false with experts: true, which has none")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSpec:
    every_minutes: float | None = 10.0
    """Minutes between two periodic checkpoints; None: none by time."""
    every_steps: int | None = None
    """Optimizer steps between two periodic checkpoints; None: none by steps."""
    keep: int = 3
    """Number of newest checkpoints that stay on a node."""
    copies: int = 2
    """Number of nodes that keep each checkpoint."""

    def __post_init__(self) -> None:
        _are_finite(self)
        if self.every_minutes is not None and self.every_minutes <= 0:
            raise ValueError(f"every_minutes is {self.every_minutes}; it must be above 0")
        if self.every_steps is not None:
            _is_count("every_steps", self.every_steps, 1)
        _is_count("keep", self.keep, 1)
        _is_count("copies", self.copies, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    model: str
    """Hub id (`org/name`), or a folder on the master or on the nodes."""
    data: DataSpec
    name: str = "run"
    objective: Objective = "sft"
    dpo_beta: float = 0.1
    """Strength of the pull towards the reference model in DPO (Rafailov et al. 2023,
    arXiv:2305.18290)."""
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    sequence_tokens: int = 2048
    """Longest sequence, in tokens; longer rows are cut and counted."""
    packing: bool = False
    """Whether several short rows share a sequence, without attention between them. SFT only."""
    batch_sequences: int = 24
    """Sequences (rows, packs of rows, or pairs) per optimizer step, over all GPUs together."""
    epochs: float = 3.0
    max_steps: int | None = None
    """Maximum number of optimizer steps; None: `epochs` decides."""
    learning_rate: float = 2.0e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_share: float = 0.03
    """Share of all steps in which the learning rate rises from 0."""
    weight_decay: float = 0.0
    max_gradient_norm: float = 1.0
    """Maximum L2 norm of the gradients; larger ones are scaled down to it."""
    optimizer: OptimizerKind = "adamw"
    precision: Precision = "auto"
    """Number format of the model; auto: bf16 on GPUs that support it, else fp16; fp32 on CPUs."""
    recompute: Recompute = "auto"
    """Layers that recompute their activations; auto: as few as memory requires."""
    compile: Literal["auto", "off"] = "auto"
    """Whether layers are compiled; auto: on GPUs of nodes with a C compiler."""
    exact: bool = True
    """Whether sums are always taken in one order, so that a resumed run is bit-exact; false: in the
    fastest order, which changes the last bits."""
    memory_gib: float | None = None
    """Maximum GPU memory of a rank, in GiB; None: what is free."""
    seed: int = 42
    nodes: Literal["all"] | tuple[str, ...] = "all"
    parallel: Parallel = "auto"
    shares: tuple[float, ...] | None = None
    """Relative share of each rank in a batch, in rank order; None: measured."""
    rebalance: bool = True
    """Whether shares are measured again during training, to follow ranks that become slower or
    faster. New shares change the last bits of the loss: false keeps a resumed run bit-exact even
    where speeds vary. Shares given in `shares` never change."""
    compression: Compression = "none"
    """Format of gradients on the network; none: fp32, exact. Lossy ones suit slow links, and add
    the error to the next step: bf16 (half the bytes), powersgd (matrices as products of rank 4)."""
    activation_bits: ActivationBits = 16
    """Bits of a feature between the stages of a pipeline; 16: as the stages compute. 8 halves what
    crosses the network, rounds by up to 1/254 of the largest of 64 features, and changes results.
    """
    evaluate_every_steps: int | None = None
    """Steps between two evaluations; None: after each epoch and at the end."""
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    recovery: Literal["auto", "resume", "off"] = "auto"
    """What follows by itself when a run loses a rank or a node. auto: the ranks that are left go on
    in their processes where they can, else the run is resumed; resume: it is always resumed, by the
    master, or by its nodes while no master is there."""
    rejoin: Literal["auto", "always", "off"] = "auto"
    """Whether nodes of the run that come back join it at a checkpoint by themselves; auto: where
    the rest of the run is longer than a restart. Never with `recovery: off`."""

    divergence: Literal["wait", "retry"] = "wait"
    """What follows a loss that is not finite; retry: the master resumes the run by itself from its
    newest checkpoint at half the learning rate."""

    def __post_init__(self) -> None:  # noqa: C901 - one rule after the other
        _are_finite(self)
        if not self.model:
            raise ValueError("model is empty; it must be a hub id or a folder")
        if self.dpo_beta <= 0:
            raise ValueError(f"dpo_beta is {self.dpo_beta}; it must be above 0")
        _at_most("dpo_beta", self.dpo_beta, MOST["dpo_beta"])
        if self.packing and not OBJECTIVES[self.objective].packs:
            raise ValueError(f"packing is true; it must be false with objective {self.objective}")
        if refusal := refuse_format(self.objective, self.data.format):
            raise ValueError(f"data.format is {refusal}")
        if self.precision == "fp64" and self.adapter.kind == "qlora":
            raise ValueError(
                "precision is fp64; with kind qlora it must be auto, fp32, bf16 or fp16, which "
                "4-bit weights are made of"
            )
        if self.memory_gib is not None and self.memory_gib <= 0:
            raise ValueError(f"memory_gib is {self.memory_gib}; it must be above 0")
        if self.memory_gib is not None:
            _at_most("memory_gib", self.memory_gib, MOST["memory_gib"])
        if self.evaluate_every_steps is not None:
            _is_count("evaluate_every_steps", self.evaluate_every_steps, 1)
        _is_count("sequence_tokens", self.sequence_tokens, 8)
        _is_count("batch_sequences", self.batch_sequences, 1)
        if self.epochs <= 0:
            raise ValueError(f"epochs is {self.epochs}; it must be above 0")
        _at_most("epochs", self.epochs, MOST["epochs"])
        if self.max_steps is not None:
            _is_count("max_steps", self.max_steps, 1)
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate is {self.learning_rate}; it must be above 0")
        reason = ": a step moves every weight by about as much, and weights are about 0.02"
        _at_most("learning_rate", self.learning_rate, MOST["learning_rate"], reason)
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup_share is {self.warmup_share}; it must be from 0 to below 1")
        _at_least("weight_decay", self.weight_decay, 0)
        _at_most("weight_decay", self.weight_decay, MOST["weight_decay"])
        if self.max_gradient_norm <= 0:
            raise ValueError(f"max_gradient_norm is {self.max_gradient_norm}; it must be above 0")
        _at_least("seed", self.seed, 0)
        _at_most("seed", self.seed, MAX_SEED)
        if not self.nodes:
            raise ValueError("nodes is empty; it must be all, or name at least one node")
        if self.nodes != "all":
            _are_distinct("nodes", self.nodes)
        if refusal := self.refuse_mode(self.parallel):
            raise ValueError(refusal)
        if self.shares is not None and (not self.shares or min(self.shares) <= 0):
            raise ValueError(f"shares is {self.shares}; every share must be above 0")

    def refuse_mode(self, parallel: str) -> str:
        """Return why a parallel mode does not train this run; empty: its row allows it."""
        for need in find_mode(parallel).needs:
            section, _, name = need.key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, name)
            if value not in need.values:
                must = f"; with parallel {parallel} it must be {join_or(need.values)}"
                return f"{need.key} is {value}{must}{need.reason}"
        return ""
