"""Checkpoints of runs over all nodes: the nodes with copies, and the copies' state.

A checkpoint is current unless a later attempt resumed from an earlier step: then another history
has replaced it, even if an offline node still holds a copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from agents.contract.requests.runs import ListCheckpoints, VerifyCheckpoint
from agents.contract.run import CheckpointInfo
from app.errors import RacklessError
from app.events import CheckpointSnapshot
from app.runs.nodes.node_pool import NodePool
from app.runs.services import Services


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    node: str
    info: CheckpointInfo

    @property
    def broken(self) -> bool:
        return self.info.verified is False or bool(self.info.problem)


async def find_copies(
    services: Services, run_id: str | None, nodes: Sequence[str]
) -> tuple[Copy, ...]:
    """Return the current copies on the nodes that answer.

    A copy with an unreadable manifest names no attempt; it is kept, so that the damage is shown.
    """
    answers = await asyncio.gather(*(_list_on(services.pool, node, run_id) for node in nodes))
    copies = [copy for answer in answers for copy in answer]
    starts = {run: resume_steps(services, run) for run in {copy.info.run_id for copy in copies}}
    return tuple(
        copy
        for copy in copies
        if copy.info.problem
        or is_current(copy.info.step, copy.info.attempt, starts[copy.info.run_id])
    )


async def _list_on(pool: NodePool, node: str, run_id: str | None) -> list[Copy]:
    try:
        infos = (await pool.agent(node).ask(ListCheckpoints(run_id=run_id))).checkpoints
    except RacklessError:
        return []
    return [Copy(node=node, info=info) for info in infos]


def resume_steps(services: Services, run_id: str) -> dict[int, int]:
    """Return the step that each known attempt of a run resumed from, by attempt."""
    if services.runs.store.get(run_id) is None:
        return {}
    attempts = services.runs.store.attempts(run_id)
    stored = {a.attempt: a.resume_step or 0 for a in attempts}
    # This master chose the starts of its own launches, and a node may write any other.
    chosen = {a.attempt: a.resume_step or 0 for a in attempts if a.inputs}
    # The journals know the start of another master's attempt; the store does not.
    journalled = {
        number: attempt.first_step
        for number, attempt in services.runs.history(run_id).attempts.items()
        if attempt.first_step is not None
    }
    return {**stored, **journalled, **chosen}


def is_current(step: int, saved_in: int, starts: Mapping[int, int]) -> bool:
    """Return True if no attempt after `saved_in` resumed from before its checkpoint of `step`."""
    return all(step <= start for attempt, start in starts.items() if attempt > saved_in)


async def verify_copies(pool: NodePool, copies: Iterable[Copy]) -> tuple[Copy, ...]:
    """Let each node hash the files of its copies."""
    return tuple(await asyncio.gather(*(_verify_copy(pool, copy) for copy in copies)))


async def _verify_copy(pool: NodePool, copy: Copy) -> Copy:
    try:
        info = await pool.agent(copy.node).ask(
            VerifyCheckpoint(run_id=copy.info.run_id, step=copy.info.step)
        )
    except RacklessError as error:
        return replace(copy, info=replace(copy.info, verified=False, problem=str(error)))
    return replace(copy, info=info)


def group_by_step(copies: Iterable[Copy]) -> tuple[CheckpointSnapshot, ...]:
    """Return one snapshot per run and step, newest first."""
    by_step: dict[tuple[str, int], list[Copy]] = {}
    for copy in copies:
        by_step.setdefault((copy.info.run_id, copy.info.step), []).append(copy)
    snapshots = [_snapshot(group) for group in by_step.values()]
    return tuple(sorted(snapshots, key=lambda s: (s.run_id, s.step), reverse=True))


def add_stalls(
    services: Services, found: Iterable[CheckpointSnapshot]
) -> tuple[CheckpointSnapshot, ...]:
    """Add the time that training paused for each checkpoint, if a mirrored journal has it."""
    return tuple(replace(one, stall_s=_find_stall_s(services, one)) for one in found)


def _find_stall_s(services: Services, checkpoint: CheckpointSnapshot) -> float | None:
    if services.runs.store.get(checkpoint.run_id) is None:
        return None
    attempts = services.runs.history(checkpoint.run_id).attempts
    # The newest attempt counts: a step that was trained again was saved again.
    saves = [attempts[number].checkpoints.get(checkpoint.step) for number in sorted(attempts)]
    return next((times.stall_s for times in reversed(saves) if times is not None), None)


def _snapshot(copies: Sequence[Copy]) -> CheckpointSnapshot:
    # A fenced attempt may have left a copy of the same step on some node.
    newest = max(copies, key=lambda copy: (copy.info.attempt, copy.info.created_s))
    hashes = {copy.info.manifest_sha256 for copy in copies}
    checks = {copy.info.verified for copy in copies}
    problems = [f"{c.node}: {c.info.problem}" for c in copies if c.info.problem]
    if len(hashes) > 1:
        problems.append("the copies differ")
    # Intact only if every copy is, and all are the same; unknown while one is unverified.
    verified = None if None in checks else checks == {True} and len(hashes) == 1
    return CheckpointSnapshot(
        run_id=newest.info.run_id,
        step=newest.info.step,
        created_s=newest.info.created_s,
        size_bytes=newest.info.size_bytes,
        nodes=tuple(copy.node for copy in copies),
        verified=verified,
        problem="; ".join(problems),
    )
