"""Resume AWQ or GPTQ at the layer where a job was interrupted, where gptqmodel can.

gptqmodel 7.6 keeps the layers that are done, and what goes into the next one, for Llamas and for
Qwen3 with experts; what comes out is the same bits. They lie beside the merged model, under a name
that stands for all that decides them, and go when the artifact is made, when the job is cancelled,
when another checkpoint is merged, or with the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import MakeJob
from agents.node.files import LAYERS_PREFIX
from agents.quantizers.job.reuse import LINEAGE_FILE
from agents.state import read_json, take_lock

_FAMILIES = ("llama", "qwen3_moe")

# gptqmodel hashes with a function of hashlib that older versions lack.
_LEAST_PYTHON = (3, 11)

# Version of how layers are made; kept layers of another version are not used.
_EDITION = 3

# Maximum number of saves in one job, since each save reads and hashes all finished layers.
_KEPT_TIMES = 8


def name_layers(
    model: Path, job: MakeJob, group: int, calibration: Sequence[Sequence[int]], version: str
) -> Path | None:
    """Return where the layers of a job lie or would lie; None: they cannot be kept.

    Args:
        model: folder that is quantized.
        job: names method, type and device.
        group: weights that share a scale.
        calibration: token ids of texts.
        version: of gptqmodel.
    """
    lineage, config = read_json(model / LINEAGE_FILE), read_json(model / "config.json")
    content = lineage.get("content") if isinstance(lineage, dict) else None
    family = config.get("model_type") if isinstance(config, dict) else None
    if not content or family not in _FAMILIES or sys.version_info < _LEAST_PYTHON:
        return None
    settings = [_EDITION, job.method, job.types, job.device, group, version]
    told = json.dumps([content, settings, [list(map(int, row)) for row in calibration]])
    key = hashlib.sha256(told.encode("ascii")).hexdigest()[:16]
    return model.with_name(f"{LAYERS_PREFIX}{model.name}-{key}")


def choose_interval(num_layers: int) -> int:
    """Return after how many layers they are kept.

    >>> choose_interval(2), choose_interval(32)
    (1, 4)
    """
    return max(1, num_layers // _KEPT_TIMES)


@contextmanager
def keeping(place: Path | None, num_layers: int) -> Iterator[dict[str, Any]]:
    """Give what `quantize` of gptqmodel takes to keep layers in a folder, or to go on with them.

    Nothing is kept where there is no place, or while another job works there. Who fails leaves
    nothing; who is killed, or told to stop when the PC shuts down, leaves what is done.
    """
    held = None if place is None else _hold(place)
    if place is None or held is None:
        yield {}
        return
    from gptqmodel import CheckpointConfig
    from gptqmodel.looper.checkpoint import CheckpointStopped

    try:
        for left in place.glob("attempt-*"):  # what was on its way to the kept layers
            shutil.rmtree(left, ignore_errors=True)
        interval = f"layer:{choose_interval(num_layers)}"
        yield {"checkpoint": CheckpointConfig(path=place, interval=interval)}
    # Stopped from outside: keep the layers for the next job.
    except CheckpointStopped:
        raise
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    else:
        shutil.rmtree(place, ignore_errors=True)
    finally:
        os.close(held)


def _hold(place: Path) -> int | None:
    """Return an open folder that no other job works in; None: one does."""
    place.mkdir(mode=0o700, exist_ok=True)
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    if take_lock(held, 0.0):
        return held
    os.close(held)
    return None


def count_kept(place: Path | None) -> int:
    """Return how many layers an earlier job has left in a folder."""
    current = read_json(place / "CURRENT") if place is not None else None
    if place is None or not isinstance(current, dict):
        return 0
    kept = read_json(place / "objects" / str(current["generations"][0]))
    return int(kept["cursor"]) if isinstance(kept, dict) else 0
