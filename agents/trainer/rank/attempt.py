"""The attempt of this rank: its intent, its folders, its position among the ranks."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.run_layout import INTENT_FILE, RUNS
from agents.contract.wire import WireError, from_wire
from agents.errors import ExpectedError
from agents.shared.login_variables import visible_card


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAttempt:
    """External input of the trainer, and the folders derived from it."""

    folder: Path
    intent: AttemptIntent
    rank: int

    @property
    def placement(self) -> RankPlacement:
        """Node and device of this rank."""
        return self.intent.ranks[self.rank]

    @property
    def device(self) -> str:
        """Name of its device in torch, which sees only this GPU if the supervisor started it."""
        place = self.placement
        shown = visible_card(place.device, place.device_id)
        is_alone = place.device != "cpu" and os.environ.get("CUDA_VISIBLE_DEVICES") == shown
        return "cuda:0" if is_alone else place.device

    @property
    def run_folder(self) -> Path:
        """`runs/<run_id>`, two folders above that of the attempt."""
        return self.folder.parent.parent

    @property
    def hashes_folder(self) -> Path | None:
        """Folder of cached hashes of big files; None outside an agent's home."""
        runs = self.run_folder.parent
        # A manual `torchrun -m agents.trainer` has any folder; files outside of it are not touched.
        return runs.parent / "hashes" if runs.name == RUNS else None

    @property
    def tokens_folder(self) -> Path:
        """Folder of tokenized data: in the agent's home, else in the run's folder."""
        runs = self.run_folder.parent
        home = runs.parent if runs.name == RUNS else self.run_folder
        return home / "cache" / "tokens"

    @property
    def num_local_ranks(self) -> int:
        """Number of ranks on this node."""
        return sum(rank.node == self.intent.node for rank in self.intent.ranks)

    @property
    def compiled_folder(self) -> Path:
        """Folder of compiled layers and of their settings, next to `tokens_folder`."""
        return self.tokens_folder.parent / "compiled"

    @property
    def layers_folder(self) -> Path:
        """Folder of models' layers for streaming, next to `tokens_folder`."""
        return self.tokens_folder.with_name("layers")

    @property
    def rank_names(self) -> list[str]:
        """Name of each rank in messages, in rank order."""
        return [f"rank {r.rank} (node {r.node}, {r.device})" for r in self.intent.ranks]


def read_attempt(folder: Path, rank: int, world_size: int) -> RankAttempt:
    """Read the intent of this attempt.

    Raises:
        ExpectedError: it cannot be read, or is for another number of ranks.
    """
    path = folder / INTENT_FILE
    try:
        intent = from_wire(AttemptIntent, json.loads(path.read_bytes()))
    except (OSError, ValueError, WireError) as error:
        raise ExpectedError(f"{path} cannot be read: {error}.", "Start the run again") from error
    if len(intent.ranks) != world_size or not 0 <= rank < world_size:
        raise ExpectedError(
            f"{path} is for {len(intent.ranks)} ranks, but this is rank {rank} of {world_size}.",
            f"Start exactly {len(intent.ranks)} ranks, such as with "
            f"torchrun --nproc-per-node {len(intent.ranks)} -m agents.trainer",
        )
    return RankAttempt(folder=folder, intent=intent, rank=rank)


def redirect_output(path: Path) -> None:
    """Redirect all output of this process and its libraries to the file."""
    # Appended to, since the supervisor may punch a hole into a long log; see `logcap`.
    # Appended to: the supervisor may cut a hole into a long log, see `logcap`.
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
