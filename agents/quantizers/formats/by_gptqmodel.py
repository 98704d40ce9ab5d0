"""Quantize with gptqmodel, layer by layer, so that few layers are on the GPU at once.

Its plain PyTorch kernels pack the result: the faster ones are compiled at their first use, which
takes minutes and a compiler that few PCs have, and speed up inference rather than quantizing.

An interrupted job resumes at its layer if the model allows it: gptqmodel 7.6 keeps the finished
layers, and the inputs of the next one, for Llamas and for Qwen3 with experts; the result has the
same bits. They are next to the merged model, under a name derived from everything that determines
them, and are deleted when the artifact is made, when the job is cancelled, when another checkpoint
is merged, or with the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import MakeJob
from agents.errors import ExpectedError
from agents.limits import count_cpus
from agents.node.files import LAYERS_PREFIX
from agents.quantizers.formats.architecture_check import refuse_divided
from agents.quantizers.formats.awq_by_gptqmodel import mended_awq
from agents.quantizers.formats.gptq_by_gptqmodel import mended_gptq
from agents.quantizers.job.heap import return_free_memory
from agents.quantizers.job.job import JobProgress
from agents.quantizers.job.reuse import LINEAGE_FILE
from agents.state import read_json, take_lock

# ------------------------------------------------------------------- kept layers

_FAMILIES = ("llama", "qwen3_moe")

# gptqmodel uses hashlib.file_digest, which older versions lack.
_LEAST_PYTHON = (3, 11)

# Version of this module's results; kept layers of another version are not used.
_EDITION = 3

# Maximum number of saves in one job, since each save reads and hashes all finished layers.
_KEPT_TIMES = 8


def name_layers(
    model: Path, job: MakeJob, group: int, calibration: Sequence[Sequence[int]], version: str
) -> Path | None:
    """Return the folder for the layers of a job, or None if they cannot be kept.

    Args:
        model: folder to quantize.
        job: method, type and device.
        group: number of weights that share a scale.
        calibration: token ids of texts.
        version: version of gptqmodel.
    """
    lineage, config = read_json(model / LINEAGE_FILE), read_json(model / "config.json")
    content = lineage.get("content") if isinstance(lineage, dict) else None
    family = config.get("model_type") if isinstance(config, dict) else None
    if not content or family not in _FAMILIES or sys.version_info < _LEAST_PYTHON:
        return None
    settings = [_EDITION, job.method, job.types, job.device, group, version]
    identity = json.dumps([content, settings, [list(map(int, row)) for row in calibration]])
    key = hashlib.sha256(identity.encode("ascii")).hexdigest()[:16]
    return model.with_name(f"{LAYERS_PREFIX}{model.name}-{key}")


def choose_interval(num_layers: int) -> int:
    """Return the number of layers between saves.

    >>> choose_interval(2), choose_interval(32)
    (1, 4)
    """
    return max(1, num_layers // _KEPT_TIMES)


@contextmanager
def keeping(place: Path | None, num_layers: int) -> Iterator[dict[str, Any]]:
    """Yield arguments of gptqmodel's `quantize` for keeping layers in a folder and resuming.

    Nothing is kept without a place, or while another job works there. A failed job leaves nothing;
    a killed job, or one stopped by a shutdown, leaves its finished layers.
    """
    held = None if place is None else _hold(place)
    if place is None or held is None:
        yield {}
        return
    from gptqmodel import CheckpointConfig
    from gptqmodel.looper.checkpoint import CheckpointStopped

    try:
        for left in place.glob("attempt-*"):  # incomplete saves
            shutil.rmtree(left, ignore_errors=True)
        interval = f"layer:{choose_interval(num_layers)}"
        yield {"checkpoint": CheckpointConfig(path=place, interval=interval)}
    # Stopped from outside, so keep the layers for the next job.
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
    """Return a locked descriptor of the folder, or None if another job works in it."""
    place.mkdir(mode=0o700, exist_ok=True)
    held = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    if take_lock(held, 0.0):
        return held
    os.close(held)
    return None


def count_kept(place: Path | None) -> int:
    """Return the number of layers that an earlier job has left in a folder."""
    current = read_json(place / "CURRENT") if place is not None else None
    if place is None or not isinstance(current, dict):
        return 0
    kept = read_json(place / "objects" / str(current["generations"][0]))
    return int(kept["cursor"]) if isinstance(kept, dict) else 0


# ------------------------------------------------------------------- quantizing

_LEAST_CORES = 8
_ROWS_AT_ONCE = 8
SCRATCH = ".scratch"
"""Subfolder of the folder that is being made. gptqmodel writes the whole model, layer by layer:
among the system's temporary files it would stay after a kill, and may not fit."""

# Losses of layers, which gptqmodel writes into the model's folder; no program loads it.
_LOG_FILE = "quant_log.csv"


class QuantizedLayers:
    """Reports finished layers to the progress of the job."""

    def __init__(self, progress: JobProgress, total: int) -> None:
        self.total = total
        self._progress = progress
        self._done: set[int] = set()

    def begin(self, place: Path | None) -> None:
        """Count the layers kept in a folder as finished."""
        if place is not None:
            self._progress.count(place)
        kept = count_kept(place)
        self._done = set(range(kept))
        if kept:
            self._progress.tell(f"Continuing after {kept} of {self.total} finished layers")

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        if submodule_finalized and layer_idx not in self._done:
            # Each layer leaves free pieces that the next one does not fill; see `heap`.
            return_free_memory()
            self._done.add(layer_idx)
            self.tell(len(self._done), self.total)

    def weigh(self) -> None:
        """Measure the disk while both the kept layers and the result are there."""
        self._progress.look()

    def tell(self, done: int, total: int) -> None:
        """Report the number of finished layers."""
        text = f"Quantized {done} of {total} layers"
        self._progress.tell(text, done=done, total=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptqmodel:
    """One model to quantize."""

    job: MakeJob
    """Method, type and device."""
    model: Path
    """Folder of Transformers."""
    folder: Path
    """Folder for the result."""
    group: int
    """Number of weights that share a scale."""
    rows: Sequence[Sequence[int]]
    """Token ids to calibrate with; AWQ needs rows of one length."""
    tokenizer: Any
    layers: QuantizedLayers

    def do(self) -> None:
        """Write the quantized model.

        Raises:
            ExpectedError: gptqmodel cannot quantize such a model, or was stopped, as by a shutdown.
        """
        let_few_cores_work()
        import torch
        from gptqmodel.looper.checkpoint import CheckpointError, CheckpointStopped

        place = name_layers(self.model, self.job, self.group, self.rows, version("gptqmodel"))
        try:
            self._quantize(place)
        except CheckpointStopped as error:
            raise ExpectedError(
                "Quantizing was stopped; the layers that are done are kept.",
                "Export again to continue with them",
            ) from error
        except CheckpointError:  # kept layers of another version, or damaged
            self._quantize(None)
        except ExpectedError:
            raise
        except torch.OutOfMemoryError as error:
            raise ExpectedError(
                f"{self.job.device} has too little free memory to quantize a layer by "
                f"{self.job.method}: {str(error).partition('. If')[0][:300]}.",
                "Close what else uses that GPU, or use nf4 or gguf",
            ) from error
        except (NotImplementedError, ValueError) as error:
            said = next(iter(str(error).splitlines()), "")
            raise ExpectedError(
                f"gptqmodel cannot make {self.job.method} of this model: {said[:200]}",
                "Use nf4 or gguf",
            ) from error

    def _quantize(self, place: Path | None) -> None:
        """Quantize, saving finished layers in `place` and reusing those found there."""
        from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

        plain = BACKEND.AWQ_TORCH if self.job.method == "awq" else BACKEND.GPTQ_TORCH
        rows = [{"input_ids": list(row), "attention_mask": [1] * len(row)} for row in self.rows]
        self.layers.begin(place)
        quantized = GPTQModel.load(
            str(self.model),
            QuantizeConfig(**self._settings()),
            device=self.job.device,
            backend=plain,
            trust_remote_code=False,
            **self._precision(place),
        )
        # Before the first layer, since quantizing takes long and the result would be useless.
        refuse_divided(self.model, quantized.model)
        quantized.layer_callback = self.layers
        mended = mended_awq(self.job.device) if self.job.method == "awq" else mended_gptq()
        with mended, keeping(place, self.layers.total) as more:
            quantized.quantize(
                calibration=rows,
                batch_size=_ROWS_AT_ONCE,
                tokenizer=self.tokenizer,
                backend=plain,
                **more,
            )
            quantized.save(str(self.folder))
            self.layers.weigh()
        (self.folder / _LOG_FILE).unlink(missing_ok=True)

    def _settings(self) -> dict[str, Any]:
        bits = int(self.job.types[0][0]) if self.job.types else 4
        settings: dict[str, Any] = {"bits": bits, "group_size": self.group}
        settings["offload_to_disk_path"] = str(self.folder / SCRATCH / "offloaded")
        if self.job.method == "awq":
            settings |= {"sym": False, "quant_method": "awq", "format": "gemm"}
        elif self.job.device != "cpu":
            # Inputs of a layer wait in RAM, since the widest Hessian needs the GPU's memory.
            settings["calibration_data_device"] = "cpu"
        return settings

    def _precision(self, place: Path | None) -> dict[str, Any]:
        """Return the precision of AWQ's computation; empty: gptqmodel's choice for the model.

        In float16 a CPU is a hundred times as slow as in bfloat16 (1 and 136 GFLOP/s on 2 cores of
        an AMD EPYC). On GPUs, families that can be resumed are quantized in float16, the usual type
        of runtimes for this layout.
        """
        import torch

        if self.job.method != "awq":
            return {}
        if self.job.device == "cpu":
            return {"dtype": torch.bfloat16}
        return {} if place is None else {"dtype": torch.float16}


def let_few_cores_work() -> None:
    """Let gptqmodel be imported on a PC with few cores, for which its thread pools are too small.

    It gives each pool a share of `os.cpu_count()`, which ignores the limits of containers, and
    rejects a pool of one thread.
    """
    num_cores = max(_LEAST_CORES, count_cpus())
    os.cpu_count = lambda: num_cores
