"""RunSpec: everything that a user specifies for a run.

One value is planned, stored, sent and kept in the checkpoint. The dataclasses are plain, because
nodes have only the standard library. The app reads run files into them through pydantic, a node
through `agents.contract.wire`. Defaults are those of a run file that sets only `model` and `data`.
Limits are checked here and nowhere else; every message names the field, its value and the limit.

Each field is annotated with its Key: a new key of the run file is one new field here, which is why
this file is long. The fields are in the order of the form, the guide and written files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from agents.contract.data import HeldOut, SourceSpec, parse_columns, parse_held_out, parse_options
from agents.contract.key import MAX_COUNT, Key, RunKey, check_limits, keys_of
from agents.contract.objectives import (
    OBJECTIVES,
    ROW_FORMATS,
    DataFormat,
    Objective,
    join_or,
    list_owners,
    refuse_format,
)
from agents.contract.parallel import PARALLEL, ParallelMode, find_mode

AdapterKind = Literal["lora", "qlora", "full"]
OptimizerKind = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
Parallel = Literal["auto", ParallelMode]
Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
Recompute = Literal["auto", "none", "all"]
Documents = Literal["file", "blank-line", "line"]
Rendered = Literal["auto", "yes", "no"]
LongText = Literal["split", "join", "cut", "refuse"]
Learn = Literal["answers", "last_answer", "everything"]
AlsoTrained = Literal["embed_tokens", "lm_head"]
Deduplicate = Literal["off", "exact", "near"]
Reasoning = Literal["learn", "keep", "drop"]
Encoding = Literal[
    "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp1252", "cp1250", "iso8859_2", "cp1251",
    "koi8_r", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr",
]  # fmt: skip
Compression = Literal["none", "bf16", "powersgd"]
ActivationBits = Literal[8, 16]
MAX_SEED = 2**63 - 1
"""Maximum seed, which every random number generator of the trainer accepts."""
MAX_PATTERN = 400
"""Maximum length of a regular expression in `targets`, in characters."""
MAX_REPEATS = 4
"""Maximum number of repeats in a pattern: each one multiplies the time by the length of a name."""
# A repeated group can take exponential time: a foreign run file could freeze the window.
_REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
_REPEAT = re.compile(r"(?<!\\)[*+{]")

# ---------------------------------------------------------------- sections of the form

MODEL, METHOD, BATCH, WHERE = (
    "Model and data", "Training method", "Batch and length", "Where to run",
)  # fmt: skip
DATA, ADAPTER, OPTIMIZATION = "Data and evaluation", "Adapter", "Optimization"
MEMORY, DEVICES, CHECKPOINTS = "Memory and speed", "Multiple devices", "Checkpoints"
BASIC_GROUPS = (MODEL, METHOD, BATCH, WHERE)
"""Sections of the form that are always visible; the others are collapsed."""
GROUPS = (*BASIC_GROUPS, DATA, ADAPTER, OPTIMIZATION, MEMORY, DEVICES, CHECKPOINTS)
_WITH_ADAPTER = ("adapter.kind", ("lora", "qlora"))

# ---------------------------------------------------------------- further rules


def _are_distinct(name: str, values: Iterable[str]) -> None:
    seen: set[str] = set()
    for value in values:
        if value in seen or not value.strip():
            what = f"{value!r} twice" if value.strip() else "an empty name"
            raise ValueError(f"{name} has {what}; each must be named once")
        seen.add(value)


def refuse_pattern(pattern: str) -> str:
    """Return why a regular expression is refused, to follow its key; empty: it is accepted.

    >>> refuse_pattern(".*(q|v)_proj"), refuse_pattern("(a+)+$")
    ('', "is the pattern '(a+)+$'; it must not repeat a group, which can take for ever")
    """
    if len(pattern) > MAX_PATTERN:
        return f"is a pattern of {len(pattern):,} characters; at most {MAX_PATTERN} are allowed"
    if len(_REPEAT.findall(pattern)) > MAX_REPEATS:
        return f"is the pattern {pattern!r}; it may repeat at most {MAX_REPEATS} times (* + {{}})"
    if _REPEATED_GROUP.search(pattern):
        return f"is the pattern {pattern!r}; it must not repeat a group, which can take for ever"
    # Nesting beyond the parser's recursion, or repeats beyond its limits, raise these.
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is the pattern {pattern!r}, which is not a regular expression: {error}"
    return ""


# ---------------------------------------------------------------- keys


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    train: Annotated[
        str,
        Key(
            label="Training data",
            help="JSONL, JSON, CSV, TSV, Parquet or text file on this PC, copied to each node "
            "once. Or the id of a public data set, which each node downloads.",
            group=MODEL,
            placeholder="chats.jsonl",
            names="file",
            may_change=True,  # the content has a hash of its own
        ),
    ]
    eval: Annotated[
        str | None,
        Key(
            label="Evaluation data",
            help="Rows that the model never trains on: a file, or a part of the training data, as "
            "a share such as 0.05, a number of rows, or auto. Leave empty to skip evaluation.",
            group=DATA,
            details="`auto` holds out 2 % of the rows, at most 200. See "
            "[Sources](sources.md#held-out-rows).",
            placeholder="none",
            names="file",
            may_change=True,
        ),
    ] = None
    """Data, or the part of the training data that is held out; see `held_out`."""
    sources: Annotated[
        tuple[SourceSpec, ...],
        Key(
            label="More training data",
            help="Each row counts as often as its weight says.",
            group=MODEL,
            details="Instead of `train`: a list of files or data sets, each with `path` and, if "
            "needed, `format`, `columns`, `weight`, `max_rows` and `split`. See "
            "[Sources](sources.md#several-sources).",
            after="data.train",
            is_wide=True,
            is_later=True,
        ),
    ] = ()
    """All sources, of which the first one is `train`; empty: `train` is the only one."""
    format: Annotated[
        DataFormat,
        Key(
            label="Data format",
            help="How each row is turned into text for the model.",
            group=DATA,
            choices=(
                ("auto", "Detect from the first rows"),
                *((row.name, row.summary) for row in ROW_FORMATS.values()),
            ),
        ),
    ] = "auto"
    ignore_columns: Annotated[
        tuple[str, ...],
        Key(
            label="Columns to ignore",
            help="Names separated by commas. The data is read as if it had no such columns.",
            group=DATA,
            details="Keys of messages count, too: `[label]`. See "
            "[Data](data.md#columns-that-are-not-trained).",
            placeholder="none",
            is_wide=True,
            is_later=True,
        ),
    ] = ()
    """Columns to read as absent. A column that changes the meaning of a row is refused unless it is
    trained or ignored."""

    columns: Annotated[
        tuple[str, ...],
        Key(
            label="Columns",
            help="Where the data has other names, separated by commas: instruction=question, "
            "output=answer.",
            group=DATA,
            details="Names are `messages`, `instruction`, `input`, `output`, `system`, `text`, "
            "`tools`, `chosen`, `rejected`; `roles.user=customer` names a role of messages. Also a "
            "mapping: `{instruction: question, roles: {customer: user}}`. A field of a column is "
            "`translation.en`. `candidates` with `score`, `rank` or `best` makes pairs, and `good` "
            "keeps good rows: [Which data for what](which-data.md#with-a-mapping).",
            placeholder="recognized",
            is_wide=True,
            is_later=True,
        ),
    ] = ()
    """Columns of the data by the names that a format reads, each as `name=column`."""
    rendered: Annotated[
        Rendered,
        Key(
            label="Rows with a template",
            help="Whether texts already have the control tokens of a chat template. They are then "
            "taken as written.",
            group=DATA,
            details="`auto` recognizes prompts that end where the answer begins, such as "
            "`<|im_start|>assistant`. With `yes`, prompt and completion are joined, and of a text "
            "only the answers between known markers are learned. Also `true` and `false`.",
            choices=(
                ("auto", "Recognize them"),
                ("yes", "They have one: take them as written"),
                ("no", "They have none: use the model's template"),
            ),
            is_later=True,
        ),
    ] = "auto"
    encoding: Annotated[
        Encoding,
        Key(
            label="Encoding of text files",
            help="How text files write their characters. Refused files name the likely one.",
            group=DATA,
            details="Names are Python's. `cp1252` reads Latin-1, `gb18030` GBK and GB 2312.",
            choices=(
                ("utf-8", "UTF-8"),
                ("utf-16", "UTF-16 with a byte order mark"),
                ("utf-16-le", "UTF-16, low byte first"),
                ("utf-16-be", "UTF-16, high byte first"),
                ("cp1252", "Western European (Windows-1252, Latin-1)"),
                ("cp1250", "Central European (Windows-1250)"),
                ("iso8859_2", "Central European (Latin-2)"),
                ("cp1251", "Cyrillic (Windows-1251)"),
                ("koi8_r", "Cyrillic (KOI8-R)"),
                ("gb18030", "Simplified Chinese (GBK, GB 18030)"),
                ("big5", "Traditional Chinese (Big5)"),
                ("shift_jis", "Japanese (Shift JIS)"),
                ("euc_jp", "Japanese (EUC)"),
                ("euc_kr", "Korean (EUC)"),
            ),
            is_later=True,
        ),
    ] = "utf-8"
    documents: Annotated[
        Documents,
        Key(
            label="Documents in text files",
            help="A .txt or .md file can hold one document or many.",
            group=DATA,
            choices=(
                ("file", "The whole file"),
                ("blank-line", "Each paragraph, up to a blank line"),
                ("line", "Each line"),
            ),
            is_later=True,
        ),
    ] = "file"
    long_text: Annotated[
        LongText,
        Key(
            label="Long text",
            help="Texts longer than a sequence are divided or cut. Conversations are cut.",
            group=DATA,
            details="`split` divides it at ends of paragraphs, lines and sentences, with every "
            "token once; `join` also fills each sequence with the next text, as pretraining does.",
            choices=(
                ("split", "Split it: every token is learned"),
                ("join", "Join all texts into full sequences"),
                ("cut", "Cut it: the rest is not learned"),
                ("refuse", "Refuse the data"),
            ),
            is_later=True,
        ),
    ] = "split"
    learn: Annotated[
        Learn,
        Key(
            label="Learned part",
            help="What the loss counts in conversations and instructions. Preference pairs always "
            "learn what differs.",
            group=DATA,
            choices=(
                ("answers", "All answers"),
                ("last_answer", "The last answer of each row"),
                ("everything", "Everything, questions included"),
            ),
            is_later=True,
        ),
    ] = "answers"
    chat_template: Annotated[
        str | None,
        Key(
            label="Chat template",
            help="A file, a known name such as chatml, or the folder of another model. Empty: the "
            "model's own.",
            group=DATA,
            details="Known are `chatml`, `llama-3`, `gemma`, `mistral`, `zephyr`, `vicuna` and "
            "`alpaca`. The run keeps its text. See [Templates](templates.md#another-template).",
            placeholder="the model's own",
            names="file",
            is_wide=True,
            is_later=True,
        ),
    ] = None
    """Text of a Jinja template, or its source; a started run has the text, or a known name."""
    template_options: Annotated[
        tuple[str, ...],
        Key(
            label="Template options",
            help="Arguments of the chat template, separated by commas: enable_thinking=false.",
            group=DATA,
            details="They hold in training, in chats and in every exported model. Also as a "
            "mapping: `{enable_thinking: false}`.",
            placeholder="none",
            is_wide=True,
            is_later=True,
        ),
    ] = ()
    """Variables of the chat template, each as `name=value` with a value in JSON, or a text."""
    new_tokens: Annotated[
        tuple[str, ...],
        Key(
            label="New tokens",
            help="Texts that become one token each, separated by commas. The model's embeddings "
            "grow if it has no room for them.",
            group=DATA,
            details="Embeddings and output layer are then trained whole. See "
            "[Templates](templates.md#new-tokens).",
            placeholder="none",
            is_wide=True,
            is_later=True,
        ),
    ] = ()
    shuffle: Annotated[
        bool,
        Key(
            label="Shuffle rows",
            help="Turn off to train in the order of the file, in every epoch.",
            group=DATA,
            details="Without it, `max_rows` takes the first rows of a source.",
            is_later=True,
        ),
    ] = True
    deduplicate: Annotated[
        Deduplicate,
        Key(
            label="Repeated rows",
            help="Rows that repeat an earlier row, in any source, can be left out.",
            group=DATA,
            details="See [Sources](sources.md#which-rows-are-used-and-in-which-order).",
            choices=(
                ("off", "Keep them"),
                ("exact", "Leave out exact copies"),
                ("near", "Leave out near copies, too"),
            ),
            is_later=True,
        ),
    ] = "off"
    reasoning: Annotated[
        Reasoning,
        Key(
            label="Reasoning",
            help="What becomes of the thoughts before the assistant's answers.",
            group=DATA,
            details="Thoughts are `reasoning_content`, `reasoning` or `thinking` of a message or "
            "an instruction row, and `<think>` in an answer. `keep` does not learn them.",
            choices=(
                ("learn", "Learn them, as the model's template has them"),
                ("keep", "Keep them as context: only answers are learned"),
                ("drop", "Leave them out"),
            ),
            is_later=True,
        ),
    ] = "learn"

    def __post_init__(self) -> None:
        parse_columns(self.columns)
        parse_options(self.template_options)
        parse_held_out(self.eval)
        if not self.train:
            raise ValueError("train is empty; it must name a file or a hub dataset")
        if self.sources and self.sources[0].path != self.train:
            raise ValueError(
                f"train is {self.train!r}, but sources begins with {self.sources[0].path!r}; give "
                "train or sources, not both"
            )
        seen = set()
        for source in self.sources:
            if (source.path, source.split) in seen:
                raise ValueError(
                    f"sources names {source.path} twice; name it once, and let its rows count "
                    "more often by weight"
                )
            seen.add((source.path, source.split))
        if not all(self.ignore_columns):
            raise ValueError("ignore_columns holds an empty name; it must name columns")
        if self.chat_template is not None and not self.chat_template.strip():
            raise ValueError("chat_template is empty; it must be a file, a name, or left out")
        _are_distinct("new_tokens", self.new_tokens)

    @property
    def held_out(self) -> HeldOut | None:
        """Part of the training data that is evaluated; None: `eval` names data, or nothing."""
        return parse_held_out(self.eval)

    @property
    def eval_path(self) -> str | None:
        """Evaluation data with files of its own."""
        return self.eval if self.held_out is None else None

    @property
    def chooses_rows(self) -> bool:
        """True if some usable rows are not trained."""
        has_limit = any(source.max_rows is not None for source in self.sources)
        return has_limit or self.deduplicate != "off" or self.held_out is not None

    def list_sources(self) -> tuple[SourceSpec, ...]:
        """Return all sources, at least one."""
        return self.sources or (SourceSpec(path=self.train),)

    def list_names(self) -> tuple[str, ...]:
        """Return the files and data sets that are read."""
        names = (*(source.path for source in self.list_sources()), self.eval_path)
        return tuple(name for name in names if name)

    def for_source(self, source: SourceSpec) -> DataSpec:
        """Return the settings by which one source is read."""
        return replace(
            self,
            train=source.path,
            sources=(),
            format=source.format or self.format,
            columns=source.columns or self.columns,
        )

    def simplify(self) -> DataSpec:
        """Return equal settings without a list of one plain source."""
        if len(self.sources) != 1 or not self.sources[0].is_plain:
            return self
        return self.for_source(self.sources[0])


PATTERN_SIGNS = frozenset("*^$|()[]\\+?")
"""Characters that make a text of `targets` a regular expression instead of a layer's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    kind: Annotated[
        AdapterKind,
        Key(
            label="Method",
            help="LoRA suits most fine-tuning. Choose QLoRA if the model does not fit in VRAM.",
            group=METHOD,
            details="QLoRA's 4 bits are NF4 with double quantization.",
            choices=(
                ("lora", "LoRA: train small matrices, the model stays frozen"),
                ("qlora", "QLoRA: LoRA on a 4-bit model, a quarter of the memory"),
                ("full", "Full: train every weight, needs the most memory"),
            ),
            is_wide=True,
        ),
    ] = "lora"
    rank: Annotated[
        int,
        Key(
            label="Rank",
            help="Size of the adapter, usually 8 to 64. Larger learns more and needs more memory.",
            group=METHOD,
            details="Inner dimension of LoRA's two matrices "
            "([arXiv:2106.09685](https://arxiv.org/abs/2106.09685)).",
            minimum=1,
            maximum=32_768,
            only_with=_WITH_ADAPTER,
        ),
    ] = 16
    alpha: Annotated[
        float,
        Key(
            label="Alpha",
            help="Strength of the adapter. Twice the rank is a good start.",
            group=METHOD,
            details="The update is multiplied by alpha / rank.",
            above=0,
            maximum=1_000_000,
            only_with=_WITH_ADAPTER,
        ),
    ] = 32.0
    dropout: Annotated[
        float,
        Key(
            label="Dropout",
            help="Share of the adapter's input set to zero in training, to reduce overfitting.",
            group=ADAPTER,
            minimum=0,
            below=1,
            after="adapter.targets",
            only_with=_WITH_ADAPTER,
        ),
    ] = 0.05
    targets: Annotated[
        str | tuple[str, ...],
        Key(
            label="Layers with an adapter",
            help="all-linear, or linear layers separated by commas: q_proj, v_proj.",
            group=ADAPTER,
            details="Full names such as `layers.31.self_attn.q_proj` and a regular expression that "
            "matches them, such as `.*layers[.][01][.].*q_proj`, work as well. Each stage of a "
            "pipeline needs one.",
            is_wide=True,
            only_with=_WITH_ADAPTER,
        ),
    ] = "all-linear"
    rslora: Annotated[
        bool,
        Key(
            label="rsLoRA: scale by the square root of the rank",
            help="Keeps updates equally strong at large ranks. Meant for large ranks.",
            group=ADAPTER,
            details="[arXiv:2312.03732](https://arxiv.org/abs/2312.03732)",
            only_with=_WITH_ADAPTER,
        ),
    ] = False
    dora: Annotated[
        bool,
        Key(
            label="DoRA: separate magnitude and direction",
            help="Often better at a small rank. The plan shows what a step then takes.",
            group=ADAPTER,
            details="[arXiv:2402.09353](https://arxiv.org/abs/2402.09353)",
            only_with=_WITH_ADAPTER,
        ),
    ] = False
    experts: Annotated[
        bool,
        Key(
            label="Adapters on the experts of a mixture, too",
            help="Matrices for each expert, which take much memory. Needs dropout 0, and no DoRA.",
            group=ADAPTER,
            details="See [below](#mixtures-of-experts).",
            only_with=_WITH_ADAPTER,
            is_later=True,
        ),
    ] = False
    """True to train adapters in the layout of PEFT's `target_parameters`, which has neither dropout
    nor DoRA."""
    also_train: Annotated[
        tuple[AlsoTrained, ...],
        Key(
            label="Also train",
            help="Whole matrices next to the adapter: embed_tokens, lm_head. They take far more "
            "memory than an adapter.",
            group=ADAPTER,
            details="PEFT's `modules_to_save`, under these names in every family. With "
            "`data.new_tokens`, both are trained. Needs `parallel` `data` or `single`.",
            placeholder="none",
            only_with=_WITH_ADAPTER,
            is_later=True,
        ),
    ] = ()

    def __post_init__(self) -> None:
        check_limits(self)
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
        _are_distinct("also_train", self.also_train)
        if self.kind == "full" and self.also_train:
            raise ValueError("also_train names weights; it must be empty with kind full")
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
    every_minutes: Annotated[
        float | None,
        Key(
            label="Save every",
            help="A power cut loses at most this much work.",
            group=CHECKPOINTS,
            unit="minutes",
            placeholder="not by time",
            above=0,
            may_change=True,
        ),
    ] = 10.0
    every_steps: Annotated[
        int | None,
        Key(
            label="And every",
            help="Also save after this many steps. Empty: only by time.",
            group=CHECKPOINTS,
            unit="steps",
            placeholder="not by steps",
            minimum=1,
            may_change=True,
        ),
    ] = None
    keep: Annotated[
        int,
        Key(
            label="Checkpoints to keep",
            help="Older checkpoints are deleted once a newer one is saved.",
            group=CHECKPOINTS,
            minimum=1,
            may_change=True,
        ),
    ] = 3
    copies: Annotated[
        int,
        Key(
            label="Copies",
            help="Number of nodes that keep each checkpoint, in case a disk fails.",
            group=CHECKPOINTS,
            minimum=1,
            may_change=True,
        ),
    ] = 2

    def __post_init__(self) -> None:
        check_limits(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    name: Annotated[
        str,
        Key(
            label="Name",
            help="Name shown in lists and run files.",
            group=MODEL,
            is_wide=True,
            may_change=True,
        ),
    ] = "run"
    model: Annotated[
        str,
        Key(
            label="Model",
            help="Hugging Face id, or a folder on this PC, which is copied to each node once.",
            group=MODEL,
            details="The folder has safetensors, and may also be at the same path on every node. "
            "One PC downloads a hub id for all nodes.",
            placeholder="meta-llama/Llama-2-7b-hf, or a folder",
            names="folder",
            may_change=True,  # its files have hashes of their own
        ),
    ]
    data: DataSpec
    objective: Annotated[
        Objective,
        Key(
            label="Objective",
            help="SFT needs chats, instructions or text. DPO needs pairs of a chosen and a "
            "rejected answer, and usually follows SFT.",
            group=METHOD,
            details="SFT is supervised fine-tuning, DPO direct preference optimization "
            "([arXiv:2305.18290](https://arxiv.org/abs/2305.18290)).",
            choices=tuple((row.name, row.summary) for row in OBJECTIVES.values()),
            is_wide=True,
        ),
    ] = "sft"
    adapter: AdapterSpec = field(default_factory=AdapterSpec)
    dpo_beta: Annotated[
        float,
        Key(
            label="Beta",
            help="How closely DPO stays to the model it starts from. Lower values allow larger "
            "changes.",
            group=METHOD,
            above=0,
            maximum=1_000,
            only_with=("objective", list_owners("dpo_beta")),
        ),
    ] = 0.1
    sequence_tokens: Annotated[
        int,
        Key(
            label="Sequence length",
            help="Longer conversations are cut, longer texts are split. Long sequences need more "
            "memory.",
            group=BATCH,
            details="What conversations lose is counted.",
            unit="tokens",
            minimum=8,
            maximum=10_000_000,
        ),
    ] = 2048
    batch_sequences: Annotated[
        int,
        Key(
            label="Batch",
            help="Sequences per step (pairs with DPO), divided over all devices by their speed.",
            group=BATCH,
            unit="sequences",
            minimum=1,
            maximum=1_000_000,
        ),
    ] = 24
    epochs: Annotated[
        float,
        Key(
            label="Epochs",
            help="How often each row is seen.",
            group=BATCH,
            above=0,
            maximum=1_000_000,
        ),
    ] = 3.0
    learning_rate: Annotated[
        float,
        Key(
            label="Learning rate",
            help="2e-4 suits LoRA and QLoRA, 2e-5 full fine-tuning, 5e-6 DPO.",
            group=BATCH,
            above=0,
            maximum=1,
            reason=": a step moves every weight by about as much, and weights are about 0.02",
            may_change=True,  # a run that diverged continues with a lower one
        ),
    ] = 2.0e-4
    packing: Annotated[
        bool,
        Key(
            label="Pack short rows",
            help="Puts several rows in one sequence, kept separate from each other. Each batch "
            "holds more rows, so there are fewer steps.",
            group=BATCH,
            details="SFT only.",
        ),
    ] = False
    nodes: Annotated[
        Literal["all"] | tuple[str, ...],
        Key(
            label="Nodes",
            help="PCs that train together. They can have different GPUs.",
            details="`all`: the plan chooses among all PCs and their GPUs. A list: every PC in it "
            "takes part, and every GPU that is listed; `tower:0` is GPU 0 of the PC `tower`.",
            group=WHERE,
            names="node",
            may_change=True,
        ),
    ] = "all"
    evaluate_every_steps: Annotated[
        int | None,
        Key(
            label="Evaluate every",
            help="Empty: after each epoch and at the end.",
            group=DATA,
            unit="steps",
            placeholder="after each epoch",
            minimum=1,
            after="data.eval",
            may_change=True,
        ),
    ] = None
    optimizer: Annotated[
        OptimizerKind,
        Key(
            label="Optimizer",
            help="8-bit saves memory in full fine-tuning. An adapter's state is small anyway.",
            group=OPTIMIZATION,
            choices=(
                ("adamw", "AdamW"),
                ("adamw_8bit", "AdamW, 8-bit"),
                ("paged_adamw_8bit", "AdamW, 8-bit, paged to RAM when VRAM is short"),
            ),
            is_wide=True,
        ),
    ] = "adamw"
    schedule: Annotated[
        Literal["cosine", "linear", "constant"],
        Key(
            label="Learning rate schedule",
            help="How the learning rate changes after the warm-up.",
            group=OPTIMIZATION,
            choices=(
                ("cosine", "Cosine decay"),
                ("linear", "Linear decay"),
                ("constant", "Constant"),
            ),
        ),
    ] = "cosine"
    warmup_share: Annotated[
        float,
        Key(
            label="Warm-up",
            help="Share of the steps in which the learning rate rises from 0: 0.03 is 3 %.",
            group=OPTIMIZATION,
            unit="of all steps",
            minimum=0,
            below=1,
        ),
    ] = 0.03
    max_gradient_norm: Annotated[
        float,
        Key(
            label="Gradient clipping",
            help="Maximum gradient norm, so that one unusual batch does no harm.",
            group=OPTIMIZATION,
            details="Larger gradients are scaled down to this L2 norm.",
            above=0,
        ),
    ] = 1.0
    weight_decay: Annotated[
        float,
        Key(
            label="Weight decay",
            help="How strongly weights are pulled towards 0. Fine-tuning mostly uses 0.",
            group=OPTIMIZATION,
            details="Of matrices only.",
            minimum=0,
            maximum=10,
        ),
    ] = 0.0
    max_steps: Annotated[
        int | None,
        Key(
            label="Max steps",
            help="Ends the run before its epochs are complete. Empty: no limit.",
            group=OPTIMIZATION,
            placeholder="no limit",
            minimum=1,
        ),
    ] = None
    seed: Annotated[
        int,
        Key(
            label="Seed",
            help="Sets the row order and all randomness: the same seed gives the same run.",
            group=OPTIMIZATION,
            minimum=0,
            maximum=MAX_SEED,
        ),
    ] = 42
    precision: Annotated[
        Precision,
        Key(
            label="Precision",
            help="Best is bf16 on GPUs that support it, fp16 on other GPUs, and fp32 on CPUs.",
            group=MEMORY,
            choices=(
                ("auto", "Best for each device"),
                ("bf16", "bf16"),
                ("fp16", "fp16 with loss scaling"),
                ("fp32", "fp32: exact, slow on GPUs"),
            ),
        ),
    ] = "auto"
    recompute: Annotated[
        Recompute,
        Key(
            label="Recompute activations",
            help="Saves memory but takes time. Decided for each GPU.",
            group=MEMORY,
            choices=(
                ("auto", "Only when memory requires"),
                ("none", "Never: fastest"),
                ("all", "In all layers: least memory"),
            ),
            may_change=True,
        ),
    ] = "auto"
    compile: Annotated[
        Literal["auto", "off"],
        Key(
            label="Compile layers",
            help="Faster steps, but the first start of a model on a node takes longer.",
            group=MEMORY,
            choices=(("auto", "On GPUs, if a compiler is installed"), ("off", "Never")),
            may_change=True,
        ),
    ] = "auto"
    memory_gib: Annotated[
        float | None,
        Key(
            label="GPU memory limit",
            help="Limit per GPU, to leave some for the desktop.",
            group=MEMORY,
            unit="GiB",
            placeholder="all that is free",
            above=0,
            maximum=MAX_COUNT,
            may_change=True,
        ),
    ] = None
    exact: Annotated[
        bool,
        Key(
            label="Bit-exact resume",
            help="A resumed run gives exactly the same result. Some GPUs are faster without it.",
            group=MEMORY,
            details="Numbers are added in the same order every time.",
            may_change=True,
        ),
    ] = True
    parallel: Annotated[
        Parallel,
        Key(
            label="Parallelism",
            help="How devices share the work. A model that fits on no single device needs a "
            "pipeline or streamed weights.",
            group=DEVICES,
            details="See [How big a model can I train?](big-models.md) Modes without a summary are "
            "planned, and cannot train yet.",
            choices=(
                ("auto", "Automatic"),
                *((row.name, row.summary) for row in PARALLEL.values() if row.runnable),
            ),
            is_wide=True,
            may_change=True,
        ),
    ] = "auto"
    rebalance: Annotated[
        bool,
        Key(
            label="Rebalance shares during the run",
            help="Adapts when a GPU gets slower or faster. Turn off for a bit-exact resume even if "
            "speeds vary.",
            group=DEVICES,
            may_change=True,
        ),
    ] = True
    """True to adapt shares during the run, which changes the last bits of the loss. Shares given in
    `shares` never change."""
    shares: Annotated[
        tuple[float, ...] | None,
        Key(
            label="Batch shares",
            help="One number per device, such as 2, 1, 1.",
            group=DEVICES,
            placeholder="measured",
            may_change=True,
        ),
    ] = None
    """Relative share of each rank in a batch, in rank order; None: measured."""
    compression: Annotated[
        Compression,
        Key(
            label="Gradient compression",
            help="For slow links. What compression loses is added back in the next step.",
            group=DEVICES,
            choices=(
                ("none", "None: fp32, exact"),
                ("bf16", "bf16: half the data"),
                ("powersgd", "PowerSGD: far less data"),
            ),
        ),
    ] = "none"
    activation_bits: Annotated[
        ActivationBits,
        Key(
            label="Pipeline features",
            help="What the stages of a pipeline send each other. 8 bits change results a little.",
            group=DEVICES,
            details="A feature is rounded by up to 1/254 of the largest of 64; the events of a run "
            "say by how much.",
            choices=(("16", "16 bits: as computed"), ("8", "8 bits: half the data")),
            is_later=True,
        ),
    ] = 16
    checkpoint: CheckpointSpec = field(default_factory=CheckpointSpec)
    recovery: Annotated[
        Literal["auto", "resume", "off"],
        Key(
            label="After a loss",
            help="Of three or more nodes, those that are left continue in their processes. "
            "Otherwise this window, rackless watch or the nodes resume the run from the newest "
            "checkpoint.",
            group=CHECKPOINTS,
            details="See [Recovery](recovery.md).",
            choices=(
                ("auto", "Continue, or resume"),
                ("resume", "Always resume"),
                ("off", "Wait for me"),
            ),
            may_change=True,
        ),
    ] = "auto"
    rejoin: Annotated[
        Literal["auto", "always", "off"],
        Key(
            label="When a node returns",
            help="Stops the run at a checkpoint and resumes it on all of its nodes. It pays off "
            "where the rest of the run is longer than a restart.",
            group=CHECKPOINTS,
            details="Never with `recovery: off`.",
            choices=(
                ("auto", "Join if it pays off"),
                ("always", "Always join"),
                ("off", "Continue without it"),
            ),
            may_change=True,
        ),
    ] = "auto"
    divergence: Annotated[
        Literal["wait", "retry"],
        Key(
            label="If the loss is not finite",
            help="Halving resumes from the newest checkpoint, up to three times.",
            group=CHECKPOINTS,
            choices=(("wait", "Wait for me"), ("retry", "Halve the learning rate")),
            may_change=True,
        ),
    ] = "wait"

    def __post_init__(self) -> None:
        check_limits(self)
        if not self.model:
            raise ValueError("model is empty; it must be a hub id or a folder")
        if self.packing and not OBJECTIVES[self.objective].packs:
            raise ValueError(f"packing is true; it must be false with objective {self.objective}")
        self._check_formats()
        if self.precision == "fp64" and self.adapter.kind == "qlora":
            raise ValueError(
                "precision is fp64; with kind qlora it must be auto, fp32, bf16 or fp16, which "
                "4-bit weights are made of"
            )
        if not self.nodes:
            raise ValueError("nodes is empty; it must be all, or name at least one node")
        if self.nodes != "all":
            _are_distinct("nodes", self.nodes)
            pinned = {node for node, device in map(split_place, self.nodes) if device is not None}
            if whole := sorted(pinned & set(self.nodes)):
                raise ValueError(
                    f"nodes lists {whole[0]} and a GPU of it; list the PC alone, or its GPUs alone"
                )
        if refusal := self.refuse_mode(self.parallel):
            raise ValueError(refusal)
        if self.shares is not None and (not self.shares or min(self.shares) <= 0):
            raise ValueError(f"shares is {self.shares}; every share must be above 0")

    @property
    def also_trained(self) -> tuple[AlsoTrained, ...]:
        """Whole matrices that are trained next to an adapter; new tokens need both."""
        if self.adapter.kind == "full":
            return ()
        return ("embed_tokens", "lm_head") if self.data.new_tokens else self.adapter.also_train

    def _check_formats(self) -> None:
        formats = {"data.format": self.data.format}
        for number, source in enumerate(self.data.sources):
            formats[f"data.sources[{number}].format"] = source.format or "auto"
        for name, row_format in formats.items():
            if refusal := refuse_format(self.objective, row_format):
                raise ValueError(f"{name} is {refusal}")

    def refuse_mode(self, parallel: str) -> str:
        """Return why a parallel mode cannot train this run; empty: it can."""
        mode = find_mode(parallel)
        if self.also_trained and (mode.has_stages or mode.streams):
            key = "adapter.also_train" if self.adapter.also_train else "data.new_tokens"
            return (
                f"{key} trains embeddings; with parallel {parallel}, which keeps them frozen, it "
                "must be empty"
            )
        for need in mode.needs:
            section, _, name = need.key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, name)
            if value not in need.values:
                must = f"; with parallel {parallel} it must be {join_or(need.values)}"
                return f"{need.key} is {value}{must}{need.reason}"
        return ""


def split_place(entry: str) -> tuple[str, str | None]:
    """Return PC and device of an entry of `nodes`; None: no particular GPU.

    >>> split_place("tower"), split_place("tower:1")
    (('tower', None), ('tower', 'cuda:1'))
    """
    node, _, index = entry.rpartition(":")
    return (node, f"cuda:{int(index)}") if node and index.isdecimal() else (entry, None)


def list_named(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return the PCs of a list of nodes, each once.

    >>> list_named(("tower:0", "laptop", "tower:1"))
    ('tower', 'laptop')
    """
    return tuple(dict.fromkeys(split_place(entry)[0] for entry in nodes))


def run_keys() -> Mapping[str, RunKey]:
    """Return every key of the run file by its dotted name, such as `adapter.rank`."""
    return keys_of(RunSpec)
