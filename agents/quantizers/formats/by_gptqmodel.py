"""Quantize with gptqmodel: layer by layer, so that few of them are on the GPU at once.

Its kernels in plain PyTorch pack the result: the faster ones are compiled at their first use,
which takes minutes and a compiler that few PCs have, and serve a model that runs rather than one
that is made.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agents.contract.requests.exports import MakeJob
from agents.errors import ExpectedError
from agents.quantizers.formats.architecture_check import refuse_divided
from agents.quantizers.formats.awq_by_gptqmodel import mended_awq
from agents.quantizers.formats.gptq_by_gptqmodel import mended_gptq
from agents.quantizers.formats.layer_resume import count_kept, keeping, name_layers
from agents.quantizers.job.heap import return_free_memory
from agents.quantizers.job.job import JobProgress

_LEAST_CORES = 8
_ROWS_AT_ONCE = 8
SCRATCH = ".scratch"
"""In the folder that is being made. gptqmodel writes the whole model, layer by layer: among the
system's temporary files it would stay when the job is killed, and may not fit."""

# Losses of layers, which gptqmodel writes beside the model; nothing loads the file.
_LOG_FILE = "quant_log.csv"


class QuantizedLayers:
    """Reports finished layers to the progress of the job."""

    def __init__(self, progress: JobProgress, total: int) -> None:
        self.total = total
        self._progress = progress
        self._done: set[int] = set()

    def begin(self, place: Path | None) -> None:
        """Take the layers that are kept in a folder as done."""
        if place is not None:
            self._progress.count(place)
        kept = count_kept(place)
        self._done = set(range(kept))
        if kept:
            self._progress.tell(f"Going on after {kept} of {self.total} layers, done before")

    def layer_complete(self, *, layer_idx: int, submodule_finalized: bool) -> None:
        if submodule_finalized and layer_idx not in self._done:
            return_free_memory()
            self._done.add(layer_idx)
            self.tell(len(self._done), self.total)

    def weigh(self) -> None:
        """Measure the disk while the kept layers and the result are both there."""
        self._progress.look()

    def tell(self, done: int, total: int) -> None:
        """Report the number of finished layers."""
        text = f"Quantized {done} of {total} layers"
        self._progress.tell(text, done=done, total=total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptqmodel:
    """One model to quantize."""

    job: MakeJob
    """Names method, type and device."""
    model: Path
    """Folder of Transformers."""
    folder: Path
    """Where the result goes."""
    group: int
    """Weights that share a scale."""
    rows: Sequence[Sequence[int]]
    """Token ids to calibrate with; AWQ needs them of one length."""
    tokenizer: Any
    layers: QuantizedLayers

    def do(self) -> None:
        """Write the quantized model.

        Raises:
            ExpectedError: it cannot do it with such a model, or was told to stop, as when the PC
                shuts down.
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
        except CheckpointError:  # they are of another version, or damaged
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
        """Do it, and keep layers in `place`, or go on with those that are there."""
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
        # Before the first layer: quantizing takes long, and the result could not be loaded.
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
            # Inputs of a layer wait in RAM, which the widest Hessian needs the GPU's memory for.
            settings["calibration_data_device"] = "cpu"
        return settings

    def _precision(self, place: Path | None) -> dict[str, Any]:
        """Return in what AWQ computes; without a word, in what gptqmodel chooses for the model.

        In float16 a processor is a hundred times as slow as in bfloat16 (1 and 136 GFLOP/s on 2
        cores of an AMD EPYC). On GPUs the families that can go on are quantized in float16, which
        is how most runtimes compute with this layout.
        """
        import torch

        if self.job.method != "awq":
            return {}
        if self.job.device == "cpu":
            return {"dtype": torch.bfloat16}
        return {} if place is None else {"dtype": torch.float16}


def let_few_cores_work() -> None:
    """Let gptqmodel be imported on a PC with few cores, where its pools of threads are too small.

    It gives each pool a share of `os.cpu_count()` and refuses a pool of one.
    """
    if (os.cpu_count() or 1) < _LEAST_CORES:
        os.cpu_count = lambda: _LEAST_CORES
