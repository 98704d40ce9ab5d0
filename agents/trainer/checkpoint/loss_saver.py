"""Save the last completed step without the other ranks when one of them, or a frozen layer, is
lost.

A surviving rank still holds the trained state of the step before. It saves that as an ordinary
checkpoint of its node, marked in the manifest, so a resume repeats at most one step. Ranks need not
agree: those that have already finished the next step save that one, and the newest wins. Only one
rank of a node writes. There are two cases: a collective fails in the training loop, or the loop
waits forever, for a silent node or for a GPU whose sum never ends. In the second case the
supervisor asks, or NCCL reports the loss, and a thread saves while the loop still waits, then ends
the process. If the remaining ranks may regroup, that thread frees the loop from its wait instead,
and saves only if that fails.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time

import torch

from agents.contract.run_layout import INTERRUPT_FILE, LOSS_FILE
from agents.state import read_json
from agents.trainer.checkpoint.saver import Saver
from agents.trainer.checkpoint.state import ResumePoint
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.state_guard import SEIZED

POLL_S = 0.2  # time between two checks, in seconds
SEIZE_S = 5.0
"""Time for a change of the state in progress, in seconds."""
END_S = 0.5
"""Time for the training loop to end by itself after a save, in seconds."""
LEAVE_S = 5.0
"""Time for the training loop to leave an interrupted group, in seconds."""
_EXIT_CODE = 3


class LossSaver:
    """Saves once after a loss. The training loop calls `note`; any thread may call the others."""

    def __init__(self, context: RankContext, saver: Saver, *, may_regroup: bool) -> None:
        self._context = context
        self._saver = saver
        self._may_regroup = may_regroup
        # Generation of the last interrupted group, and the time on the monotonic clock.
        self._interrupted = (-1, 0.0)
        self._point: ResumePoint | None = None
        # Recorded after the last change of the state on its GPU.
        self._changed: torch.cuda.Event | None = None
        self._lock = threading.Lock()
        self._is_done = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loss-saver", daemon=True)

    def note(self, point: ResumePoint) -> None:
        """Record a completed step; called while the state cannot be seized."""
        self._point = point
        if self._context.device.type == "cuda":
            self._changed = torch.cuda.Event()
            self._changed.record()

    def watch(self) -> None:
        """Start to watch for the supervisor's request and NCCL's error."""
        if self._context.group.world_size > 1:
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(END_S)  # it reads the group, which is left next

    def save(self) -> None:
        """Save the last completed step once; failures are journaled."""
        with self._lock:
            if self._is_done:
                return
            self._is_done = True
            if self._point is None:
                return  # no step yet: the start of this attempt is saved
            # Before anything else, since the supervisor waits for a rank that saves.
            self._context.enter_phase("saving", self._point.step)
            obstacle = self._save()
            if obstacle:
                self._warn(self._point.step, obstacle)
            self._context.enter_phase("training", self._point.step)

    def _save(self) -> str:
        """Save the newest point; return why that is impossible, or an empty text."""
        if not self._context.guard.seize(SEIZE_S):
            return "it was in the middle of an optimizer step"
        assert self._point is not None
        try:
            return self._saver.save_at_loss(self._point, self._changed)
        except (OSError, RuntimeError) as error:  # a full disk, a GPU that fails
            return f"{type(error).__name__}: {error}".strip().split("\n", 1)[0]

    def _warn(self, step: int, reason: str) -> None:
        name = self._context.attempt.rank_names[self._context.attempt.rank]
        self._context.journal.write(
            "warning",
            message=f"{name} could not save step {step} before the attempt ended: {reason}.",
            hint="The run resumes from an earlier checkpoint, or from what another rank has saved",
            of_rank=True,
        )

    def _run(self) -> None:
        path = self._context.attempt.folder / LOSS_FILE
        while not self._ended.wait(POLL_S):
            if path.exists() or (self._is_group_lost() and not self._interrupt()):
                self._save_and_end()

    def _is_group_lost(self) -> bool:
        """Return whether the loop may wait for a lost rank."""
        group = self._context.group
        if not group.is_connected:
            return False
        # NCCL's own watchdog notices a lost rank while the loop waits for the GPU.
        if group.failure or self._interrupted[0] == group.generation:
            return True
        asked = read_json(self._context.attempt.folder / INTERRUPT_FILE) or {}
        return asked.get("generation") == group.generation

    def _interrupt(self) -> bool:
        """Free the loop from its wait so that it can regroup; return whether that may work."""
        group = self._context.group
        generation, since_s = self._interrupted
        if not self._may_regroup:
            return False
        if generation == group.generation:
            return time.monotonic() - since_s < LEAVE_S
        self._interrupted = (group.generation, time.monotonic())
        group.interrupt(group.failure or "its node found that another one does not answer")
        return True

    def _save_and_end(self) -> None:
        try:
            self.save()
        finally:
            # A loop that does not wait for others ends by itself, with a better message.
            if not self._ended.wait(END_S):
                self._end()

    def _end(self) -> None:
        # Shows in the log where the loop waited.
        faulthandler.dump_traceback(file=sys.stderr)
        name = self._context.attempt.rank_names[self._context.attempt.rank]
        self._context.journal.write(
            "failed",
            message=f"{name} {SEIZED}.",
            hint="Find the rank that ended first; its log says why",
        )
        self._context.journal.close(END_S)
        # The loop may wait in a library that cannot be interrupted.
        os._exit(_EXIT_CODE)
