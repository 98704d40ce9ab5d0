"""Prove a result of Transformers: packed, as it will be used, if memory can hold it.

Packed layers unpack their weights themselves, so the whole model must be on a GPU or in RAM. If it
fits neither, its weights are unpacked to 16 bits on the disk, and read from there for each pass
like those of the original. Answers and distances are equal except for rounding; speeds would be
those of the disk, and are not measured.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agents.contract.requests.exports import MakeJob
from agents.errors import ExpectedError
from agents.quantizers.formats.unpacking import PackedModel
from agents.quantizers.inference.models import (
    choose_place,
    continue_prompts,
    give_back,
    load_model,
    name_transformers,
    read_free_memory,
    time_answer,
    weigh,
    widen,
)
from agents.quantizers.job.job import JobProgress, copy_companions
from agents.quantizers.merging.shard_files import SHARD_BYTES
from agents.quantizers.proof.compare import ModelPredictor
from agents.quantizers.proof.reference_model import Original, answers_at_once, measure_from_files
from agents.quantizers.proof.verdict import Proof

_UNPACKED = ".unpacked"
# Size of a value unpacked on a CPU, whose kernels keep it in float32.
_WIDE_BYTES = 4
_PLAIN_BYTES = 2


def expect_room(job: MakeJob, model: Path, destination: Path) -> None:
    """Check, before hours of work, that the result can be measured in memory or from the disk.

    This assumes the smallest possible result, and that free memory stays free.

    Args:
        job: method, types and device.
        model: folder of the merged model.
        destination: future folder of the result, on the disk to check.

    Raises:
        ExpectedError: neither memory nor disk has room for it.
    """
    whole = weigh(model)
    config = json.loads((model / "config.json").read_bytes())
    num_weights = whole // (4 if config.get("dtype") == "float32" else _PLAIN_BYTES)
    packed = num_weights * (8 if job.types == ("8-bit",) else 4) // 8
    free_gpu_bytes, free_bytes = read_free_memory(job.device)
    place = choose_place(packed, job.device, free_gpu_bytes, free_bytes, may_stream=True)
    is_on_gpu = place.device != "cpu" and place.resident_bytes is None
    if is_on_gpu or packed + _WIDE_BYTES * num_weights <= free_bytes:
        return
    unpacked = _PLAIN_BYTES * num_weights
    disk = next(parent for parent in destination.parents if parent.is_dir())
    _require_room(disk, packed + _needed_room(unpacked))


def prove_folder(job: MakeJob, folder: Path, first: Original, progress: JobProgress) -> Proof:
    """Measure a result.

    Args:
        job: method, types and device.
        folder: folder of the result, in which it may be unpacked temporarily.
        first: measurements of the original.
        progress: progress of the job.

    Raises:
        ExpectedError: neither memory nor disk has room for it.
    """
    progress.begin("proof", "Loading the result in Transformers and measuring it")
    if is_held_packed(folder, job.device):
        try:
            return _prove_packed(job, folder, first)
        except torch.OutOfMemoryError:  # its layers need more memory for unpacking
            pass
    return prove_unpacked(job, folder, first, progress)


def is_held_packed(folder: Path, device: str) -> bool:
    """Return whether GPU or RAM can hold a packed model while it is used.

    If the GPU cannot, streaming plain weights to it layer by layer is many times as fast as the
    CPU; but without disk space for plain weights, RAM has to do.
    """
    packed, (free_gpu_bytes, free_bytes) = PackedModel(folder), read_free_memory(device)
    place = choose_place(weigh(folder), device, free_gpu_bytes, free_bytes, may_stream=True)
    if place.device != "cpu" and place.resident_bytes is None:
        return True
    unpacked_bytes = _WIDE_BYTES * packed.num_packed + 2 * packed.plain_bytes
    if weigh(folder) + unpacked_bytes > free_bytes:
        return False
    has_room = shutil.disk_usage(folder).free >= _needed_room(packed.unpacked_bytes)
    return place.device == "cpu" or not has_room


def _require_room(disk: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(disk).free
    if free_bytes < needed_bytes:
        raise ExpectedError(
            "Neither GPU nor memory holds the result, and to measure it from the disk "
            f"{needed_bytes / 1e9:,.1f} GB more are needed in {disk}, where "
            f"{free_bytes / 1e9:,.1f} GB are free.",
            "Free some room there and export again, or choose gguf",
        )


def _needed_room(unpacked_bytes: int) -> int:
    return unpacked_bytes + min(
        unpacked_bytes, SHARD_BYTES
    )  # the tensors of one file are buffered in another


def _prove_packed(job: MakeJob, folder: Path, first: Original) -> Proof:
    times = None
    if job.method == "nf4" and job.device == "cpu":  # layers keep unpacked weights after use
        times = time_answer(load_model(folder, job.device), first.prompts[0])
    made = load_model(folder, job.device)
    if times is None:
        times = time_answer(made, first.prompts[0])
    else:
        widen(made)
    return _prove(job, folder, first, made, times)


def prove_unpacked(job: MakeJob, folder: Path, first: Original, progress: JobProgress) -> Proof:
    """Measure a result by its weights in 16 bits, unpacked temporarily into its folder.

    Raises:
        ExpectedError: the disk has no room for them.
    """
    give_back()
    packed, unpacked = PackedModel(folder), folder / _UNPACKED
    _require_room(folder.parent, _needed_room(packed.unpacked_bytes))
    progress.tell("Neither GPU nor memory holds the result: unpacking it to 16 bits on the disk")
    try:
        packed.unpack(unpacked, job.device)
        copy_companions(folder, unpacked)
        progress.look()
        progress.tell("Measuring the unpacked result")
        proof = measure_from_files(
            unpacked, job.device, lambda made: _prove(job, folder, first, made, None)
        )
        return replace(proof, is_unpacked=True)
    finally:
        shutil.rmtree(unpacked, ignore_errors=True)


def _prove(
    job: MakeJob, folder: Path, first: Original, made: Any, times: tuple[float, float] | None
) -> Proof:
    return first.prove(
        " ".join((job.method, *job.types)),
        ModelPredictor(made),
        continue_prompts(made, first.prompts, at_once=answers_at_once(job.device)),
        times,
        weigh(folder),
        name_transformers(),
    )
