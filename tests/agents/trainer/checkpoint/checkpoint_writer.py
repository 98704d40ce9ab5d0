"""Commit checkpoints without end, to be killed: `python -m ... FOLDER ATTEMPT [last step]`.

The files hold pseudo-random bytes that follow from the step. Needs nothing but the standard
library, so that it starts in a blink.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from agents.trainer.checkpoint.folder import CheckpointFolder
from agents.trainer.rank.failpoints import failpoints_from_environment

ABOUT = {"spec_sha256": "s", "data_sha256": "d", "model_sha256": "m", "versions": {}}
NAMES = ("adapter_model.safetensors", "optimizer.safetensors", "state.json")


def content(name: str, step: int) -> bytes:
    return random.Random(f"{name}/{step}").randbytes(20_000 + 977 * (step % 7))


def write_files(folder: Path, step: int) -> None:
    for name in NAMES:
        (folder / name).write_bytes(content(name, step))


def open_folder(run: Path, attempt: int) -> CheckpointFolder:
    return CheckpointFolder(
        run / "checkpoints",
        run_id=run.name,
        attempt=attempt,
        fence=run / "fence",
        failpoints=failpoints_from_environment(),
    )


def main(run: Path, attempt: int, last_step: int) -> None:
    folder = open_folder(run, attempt)
    folder.clean()
    found = folder.find_all()
    step = found[-1].manifest.step if found else 0
    print("ready", flush=True)
    while step < last_step:
        step += 1
        folder.commit(step, lambda path, step=step: write_files(path, step), ABOUT)  # type: ignore[misc]
        folder.prune(2)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 10**9)
