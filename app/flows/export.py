"""Quantize and export: the steps of the wizard, the problems of an answer, the resulting jobs.

A target is a format with its type, such as `gguf:Q4_K_M`. Types of GGUF are made in one job, since
they share its work; everything else is a job of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from agents.contract.formats import ENGINES, EXPORTS, Engine
from app.artifacts.estimates.plan import ExportPlan, PlacePlan
from app.artifacts.exports.request import ExportRequest
from app.shell_words import command_here
from app.text import file_name, show_bytes, show_duration, show_list

Step = Literal["what", "formats", "calibration", "where", "summary"]
STEPS: tuple[tuple[Step, str], ...] = (
    ("what", "Checkpoint"),
    ("formats", "Formats"),
    ("calibration", "Calibration"),
    ("where", "Where"),
    ("summary", "Summary"),
)
NO_CHECKPOINT = "The nodes that respond have no complete checkpoint of this run."
_BEGINS_SOMEWHERE = re.compile(r"[~/\\]|[A-Za-z]:")


@dataclass(frozen=True, kw_only=True, slots=True)
class Maker:
    """Engine that the wizard offers."""

    key: str
    label: str
    help: str


MAKERS = (
    Maker(
        key="gptqmodel",
        label="gptqmodel",
        help="Actively maintained. Can continue an interrupted export (Llama models).",
    ),
    Maker(
        key="autoawq",
        label="AutoAWQ",
        help=(
            "No longer maintained, with its own file layout. Equally close to the original in "
            "our tests."
        ),
    ),
)
"""Packages that can make AWQ, by engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportAnswers:
    checkpoint: int | None = None
    """Step of the checkpoint; None: the newest complete one."""
    targets: tuple[str, ...] = ()
    """Targets, from `offer_targets`."""
    engine: Engine = ENGINES[0]
    """Package that makes AWQ."""
    calibration: str = ""
    """Calibration data file on this PC; empty: the run's own data."""
    node: str = ""
    """Node that does the work; empty: the quickest that can."""
    folder: str = ""
    """Destination on this PC; several jobs each get a folder in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportJob:
    """One export of the wizard."""

    request: ExportRequest
    folder: str
    """Destination on this PC."""

    @property
    def label(self) -> str:
        """Format, types and package of the result, as a label.

        >>> types = ("Q8_0", "Q4_K_M")
        >>> ExportJob(request=ExportRequest(run_id="r", to="gguf", types=types), folder="x").label
        'GGUF Q8_0 and Q4_K_M'
        """
        to, engine = self.request.to, self.request.engine
        name = "Merged model" if to == "merged" else to.upper()
        maker = "" if engine == ENGINES[0] else f"by {name_maker(engine)}"
        return " ".join((name, *filter(None, (" and ".join(self.request.types), maker))))


def name_maker(engine: str) -> str:
    """Return the label of an engine."""
    return next(one.label for one in MAKERS if one.key == engine)


def offer_targets(to: str) -> tuple[tuple[str, str], ...]:
    """Return the targets of a format, each with its label; without types it is its own target.

    >>> offer_targets("gptq")
    (('gptq:4-bit', '4-bit'), ('gptq:8-bit', '8-bit, closer to the original'))
    >>> offer_targets("awq")
    (('awq', 'AWQ, 4-bit'),)
    """
    row = EXPORTS[to]
    if not row.types:
        return ((to, row.label),)
    return tuple((f"{to}:{kind}", label) for kind, label in row.types.items())


def split_target(target: str) -> tuple[str, tuple[str, ...]]:
    """Return format and types of a target.

    >>> split_target("gguf:Q8_0"), split_target("awq")
    (('gguf', ('Q8_0',)), ('awq', ()))
    """
    to, _, kind = target.partition(":")
    return to, (kind,) if kind else ()


def group_targets(to: str, targets: Sequence[str]) -> list[list[str]]:
    """Group the targets of a format by the job that makes them.

    >>> group_targets("gguf", ["gguf:F16", "gguf:Q8_0"]), group_targets("gptq", ["gptq:4-bit"])
    ([['gguf:F16', 'gguf:Q8_0']], [['gptq:4-bit']])
    """
    joined = EXPORTS[to].joins_types and targets
    return [list(targets)] if joined else [[target] for target in targets]


def split_targets(targets: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return the format of the targets of one job, and all their types."""
    types = tuple(kind for target in targets for kind in split_target(target)[1])
    return split_target(targets[0])[0], types


def place_folder(text: str) -> str:
    """Return the folder of a typed path; a relative path starts in the home folder.

    >>> place_folder(" /m/out/ "), place_folder("out"), place_folder("~/out"), place_folder("/")
    ('/m/out', '~/out', '~/out', '/')
    """
    folder = text.strip().rstrip("/") or text.strip()
    is_placed = not folder or _BEGINS_SOMEWHERE.match(folder)
    return folder if is_placed else f"~/{folder}"


def list_jobs(run_id: str, answers: ExportAnswers) -> tuple[ExportJob, ...]:
    """Return the exports that the answers request, in the order of the formats."""
    groups: list[tuple[str, tuple[str, ...]]] = []
    for name in EXPORTS:
        chosen = [target for target, _ in offer_targets(name) if target in answers.targets]
        groups += [split_targets(group) for group in group_targets(name, chosen)]
    folder = place_folder(answers.folder)
    own = answers.calibration.strip()
    return tuple(
        ExportJob(
            request=ExportRequest(
                run_id=run_id,
                to=to,
                types=types,
                checkpoint=answers.checkpoint,
                node=answers.node or None,
                calibration=own if own and EXPORTS[to].calibrated else None,
                # The answer is meant for AWQ; the other formats of the wizard have one engine.
                engine=answers.engine if answers.engine in EXPORTS[to].engines else ENGINES[0],
            ),
            folder=folder if len(groups) == 1 else f"{folder}/{_name_folder(to, types, groups)}",
        )
        for to, types in groups
    )


def _name_folder(
    to: str, types: Sequence[str], groups: Sequence[tuple[str, tuple[str, ...]]]
) -> str:
    is_alone = sum(other == to for other, _ in groups) == 1
    return to if is_alone else f"{to}-{types[0]}"


def asks_calibration(answers: ExportAnswers) -> bool:
    """Return whether a chosen target is calibrated with data."""
    return any(EXPORTS[split_target(target)[0]].calibrated for target in answers.targets)


def find_problems(
    step: Step,
    answers: ExportAnswers,
    *,
    checkpoint_problem: str = "",
    calibration_problem: str = "",
    place_problem: str = "",
) -> str:
    """Return the problem that blocks the next step; empty: none.

    Args:
        step: current step of the wizard.
        answers: answers so far.
        checkpoint_problem: reason why there is no checkpoint to export.
        calibration_problem: problem of the data file, as last checked.
        place_problem: problem that all nodes have, or of the folder, as last checked.
    """
    if step == "what":
        return checkpoint_problem
    if step == "formats" and not answers.targets:
        return "Choose at least one format."
    if step == "calibration" and asks_calibration(answers):
        return calibration_problem
    if step == "where" and not answers.folder.strip():
        return "Choose an output folder."
    return place_problem if step in ("where", "summary") else ""


def next_step(step: Step, answers: ExportAnswers, by: int) -> Step:
    """Return the step after (1) or before (-1) another, skipping calibration where not needed."""
    keys = [key for key, _ in STEPS if key != "calibration" or asks_calibration(answers)]
    # The calibration step is missing from `keys` once its last target was deselected.
    place = keys.index(step) if step in keys else keys.index("formats")
    return keys[min(max(place + by, 0), len(keys) - 1)]


def describe_commands(run_id: str, answers: ExportAnswers) -> tuple[str, ...]:
    """Return the command lines that run the same exports.

    >>> answers = ExportAnswers(targets=("gguf:Q8_0",), folder="/m/my model", node="pc")
    >>> describe_commands("r-1", answers)
    ("rackless export r-1 --to gguf --type Q8_0 --node pc --out '/m/my model'",)
    """
    # The same jobs as the wizard would run, with defaults left out.
    commands = []
    for job in list_jobs(run_id, answers):
        asked = job.request
        words = ["rackless", "export", run_id, "--to", asked.to]
        for kind in asked.types:
            words += ["--type", kind]
        if asked.engine != ENGINES[0]:
            words += ["--engine", asked.engine]
        if asked.checkpoint is not None:
            words += ["--checkpoint", str(asked.checkpoint)]
        if asked.node:
            words += ["--node", asked.node]
        if asked.calibration is not None:
            words += ["--calibration", asked.calibration]
        commands.append(command_here(*words, "--out", job.folder))
    return tuple(commands)


def suggest_folder(home: str, run_name: str) -> str:
    """Suggest a folder for the result; any run name makes one valid folder name.

    >>> suggest_folder("/home/me/", "my run"), suggest_folder("/home/me", "a/b: c")
    ('/home/me/my run-export', '/home/me/a-b- c-export')
    """
    return f"{home.rstrip('/')}/{file_name(run_name)}-export"


_PHASES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Looking for the checkpoint", ("find",)),
    ("Merging", ("check", "load", "merge")),
    ("Getting ready", ("prepare", "wait", "texts")),
    ("Measuring the original", ("original", "control")),
    ("Quantizing", ("build", "quantize")),
    ("Proving the result", ("proof",)),
    ("Fetching", ("fetch",)),
)
PHASES = tuple(label for label, _ in _PHASES)
_PLACES = {phase: place for place, (_, phases) in enumerate(_PHASES) for phase in phases}


def place_phase(phase: str, now: int) -> int:
    """Return the place in `PHASES` of a phase that core or node report; never before `now`.

    Agents of other versions may report phases that are unknown here, which change nothing.

    >>> PHASES[place_phase("quantize", 3)], PHASES[place_phase("", 4)]
    ('Quantizing', 'Quantizing')
    """
    return max(now, _PLACES.get(phase, now))


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceRow:
    """A node that could run all of the jobs."""

    node: str
    words: str
    """Time, memory and disk the jobs need there, with notes."""
    problem: str
    """Reason why the jobs cannot run there; empty: they can."""


def join_places(plans: Sequence[ExportPlan]) -> tuple[PlaceRow, ...]:
    """Return each node once, over the plans of all jobs: able nodes first, the quickest first.

    Jobs are made one after the other: seconds add up, memory and disk are the most of any.
    """
    found: dict[str, list[PlacePlan]] = {}
    for plan in plans:
        for place in plan.places:
            found.setdefault(place.node, []).append(place)
    rows = [(_seconds(places), _join(node, places)) for node, places in found.items()]
    rows.sort(key=lambda row: (bool(row[1].problem), row[0]))
    return tuple(row for _, row in rows)


def _seconds(places: Sequence[PlacePlan]) -> float:
    return sum(place.seconds or 0.0 for place in places)


def _join(node: str, places: Sequence[PlacePlan]) -> PlaceRow:
    problems = tuple(dict.fromkeys(text for place in places for text in place.problems))
    if problems:
        return PlaceRow(node=node, words="", problem=f"It {show_list(problems)}.")
    parts = [f"about {show_duration(_seconds(places))}"] if _seconds(places) else []
    for values, what in (
        ([place.ram_bytes for place in places], "of memory"),
        ([place.vram_bytes for place in places], "of GPU memory"),
        ([place.node_bytes for place in places], "of its disk while exporting"),
    ):
        # Jobs run one after the other, so the largest need counts, not the sum.
        known = [value for value in values if value]
        if known:
            parts.append(f"{show_bytes(max(known))} {what}")
    words = ", ".join(parts) or "Time and memory are not known"
    notes = dict.fromkeys(remark for place in places for remark in place.remarks)
    return PlaceRow(node=node, words="; ".join((words, *notes)), problem="")


def describe_target(target: str, plan: ExportPlan) -> str:
    """Describe one target: its size, and the time if it was forecast alone."""
    _, types = split_target(target)
    sizes = dict(plan.made.files) if plan.made is not None else {}
    size = sizes.get(types[0]) if types and types[0] in sizes else next(iter(sizes.values()), None)
    if size is None:
        return ""
    parts = [show_bytes(size)]
    best = plan.best
    if best is None:
        parts.append("no node can run it now")
    # One job makes all types of a plan: its time cannot be divided among them.
    elif best.seconds and len(plan.types) <= 1:
        parts.append(f"about {show_duration(best.seconds)} on {best.node}")
        memory = best.vram_bytes or best.ram_bytes
        parts.append(f"{show_bytes(memory)} of {'GPU ' * bool(best.vram_bytes)}memory")
    return ", ".join(parts)
