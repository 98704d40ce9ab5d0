"""Names of a run's folders and files, shared by nodes, ranks and the master's mirrors.

    runs/RUN_ID/fence                           number of the newest attempt
    runs/RUN_ID/halted                          newest attempt that a stop forbids to start
    runs/RUN_ID/attempts/N/                     intent.json, started.json, confirmed.json,
                                                owner.json, stop.json, loss.json, exit.json,
                                                interrupt.json, regroup.json, layers.json,
                                                kept, closed.json, election.json,
                                                supervisor.jsonl, supervisor.log, and per rank
                                                rank-R.log, rank-R.jsonl, rank-R.heartbeat
    runs/RUN_ID/checkpoints/step-NNNNNNNN/      manifest.json, state.json, tensors

`runs` lies in the agent's home. The master mirrors logs and journals below its own home, with the
name of the node in between: runs/RUN_ID/attempts/N/NODE/rank-R.log.

Nodes still have folders of older versions, so a name that changes here makes their runs and
checkpoints unreadable.
"""

from __future__ import annotations

import re
from pathlib import Path

from agents.contract.names import MAX_ATTEMPT, whole_number

RUNS = "runs"
ATTEMPTS = "attempts"
CHECKPOINTS = "checkpoints"
FENCE = "fence"
HALT = "halted"
MASTER_KEYS = "master-keys.json"
"""Public keys of the masters that have launched attempts of a run on the node."""

INTENT_FILE = "intent.json"
STARTED_FILE = "started.json"
CONFIRMED_FILE = "confirmed.json"
OWNER_FILE = "owner.json"
"""Names the master that took over the attempt."""
STOP_FILE = "stop.json"
LOSS_FILE = "loss.json"
"""Asks the ranks to save their state and end, since another rank was lost."""
INTERRUPT_FILE = "interrupt.json"
"""Asks the ranks to leave the group in which they wait, since another of its nodes is silent."""
REGROUP_FILE = "regroup.json"
"""Names the nodes whose ranks continue in their living processes after the loss of others."""
SHARED_LAYERS_FILE = "layers.json"
"""Tells ranks of the node how to open their shared memory of frozen layers."""
KEPT_FILE = "kept"
ENDED_PEER_FILE = "ended_peer.json"
"""Names a node whose part has ended while the ranks of this node load, and the reason."""
CLOSED_FILE = "closed.json"
ELECTION_FILE = "election.json"
EXIT_FILE = "exit.json"
SUPERVISOR_JOURNAL = "supervisor.jsonl"
SUPERVISOR_LOG = "supervisor.log"

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"

LOG_SUFFIX = ".log"

# Matched as a whole, so that partial and deleted folders, and paths, never match.
# Only ASCII digits (`\d` has more), and one spelling per number: two names for one rank would give
# it two histories.
_STEP = r"([0-9]{8}|[1-9][0-9]{8,11})"
_RANK = r"(0|[1-9][0-9]{0,5})"
_CHECKPOINT = re.compile(f"step-{_STEP}")
_RANK_LOG = re.compile(rf"rank-{_RANK}\.log")
_RANK_JOURNAL = re.compile(rf"rank-{_RANK}\.jsonl")
_TRACE = re.compile(rf"trace-{_STEP}-rank-{_RANK}\.json\.gz")


def attempt_folder(run: Path, attempt: int) -> Path:
    """Return the folder of an attempt within the folder of its run."""
    return run / ATTEMPTS / str(attempt)


def attempt_of_folder(name: str) -> int | None:
    """Return the attempt of the folder with this name, or None if it is not an attempt's.

    >>> [attempt_of_folder(name) for name in ("1", "12", "0", "01", "1x", "-1", "..")]
    [1, 12, None, None, None, None, None]
    """
    number = whole_number(name)
    return number if number is not None and 1 <= number <= MAX_ATTEMPT else None


def rank_log(rank: int) -> str:
    """Return the file with the output of a rank."""
    return f"rank-{rank}{LOG_SUFFIX}"


def rank_journal(rank: int) -> str:
    """Return the file with a rank's records: steps, checkpoints, failures."""
    return f"rank-{rank}.jsonl"


def rank_heartbeat(rank: int) -> str:
    """Return the file in which a rank reports its step and phase."""
    return f"rank-{rank}.heartbeat"


def trace_name(first_step: int, rank: int) -> str:
    """Return the file of a profiler trace that begins with `first_step`."""
    return f"trace-{first_step:08d}-rank-{rank}.json.gz"


def rank_of_log(name: str) -> int | None:
    """Return the rank of a log with this name, or None if it is not a rank's log.

    >>> rank_of_log("rank-12.log"), rank_of_log("supervisor.log")
    (12, None)
    """
    return _number(_RANK_LOG, name)


def rank_of_journal(name: str) -> int | None:
    """Return the rank of a journal with this name, or None if it is not a rank's journal."""
    return _number(_RANK_JOURNAL, name)


def is_stream(name: str) -> bool:
    """Return whether the master may follow this file of an attempt, which only grows.

    >>> [is_stream(name) for name in (SUPERVISOR_JOURNAL, rank_log(3), trace_name(7, 0))]
    [True, True, True]
    >>> others = (INTENT_FILE, "rank-0.log/../intent.json", "rank-00.log", "rank-\\u0663.log")
    >>> any(is_stream(name) for name in others)
    False
    """
    patterns = (_RANK_LOG, _RANK_JOURNAL, _TRACE)
    return name == SUPERVISOR_JOURNAL or any(pattern.fullmatch(name) for pattern in patterns)


def checkpoint_name(step: int) -> str:
    """Return the folder of a checkpoint; its eight digits sort names by step.

    >>> checkpoint_name(400)
    'step-00000400'
    """
    return f"step-{step:08d}"


def step_of_checkpoint(name: str) -> int | None:
    """Return the step of a checkpoint's folder, or None if it is not a complete checkpoint's name.

    >>> step_of_checkpoint("step-00000400"), step_of_checkpoint(".partial-00000400-1-77")
    (400, None)
    """
    return _number(_CHECKPOINT, name)


def checkpoint_path(run_id: str, step: int) -> str:
    """Return the folder of a checkpoint relative to the agent's home."""
    return f"{RUNS}/{run_id}/{CHECKPOINTS}/{checkpoint_name(step)}"


def _number(pattern: re.Pattern[str], name: str) -> int | None:
    match = pattern.fullmatch(name)
    return int(match[1]) if match else None
