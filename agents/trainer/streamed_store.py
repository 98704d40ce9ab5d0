"""Open the store of streamed layers if a rank streams some.

Only then it waits for the model's hash, which names the files of its layers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from agents.contract.run_layout import SHARED_LAYERS_FILE
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.model.layer_store import LayerPeers, StreamedLayers
from agents.trainer.rank.context import RankContext
from agents.trainer.rank.device import choose_dtype
from agents.trainer.streaming.disk_reader import DiskReader
from agents.trainer.streaming.host_memory import HostMemory, choose_budget
from agents.trainer.streaming.layer_files import StreamedLayerFiles
from agents.trainer.streaming.layer_stream import LayerStream
from agents.trainer.streaming.shared_blocks import SharedBlocks, join_blocks

# Other releases may quantize or convert differently.
_PACKAGES = ("transformers", "bitsandbytes")
# Fraction of the time of passes spent waiting for a disk from which the user is warned.
_WAITING_SHARE = 0.1


class DeferredStore:
    """Store of one rank, created on demand.

    Args:
        context: context of the rank.
        folder: folder of the model.
        model_hash: hash of its files, if another thread computes it; else None.
    """

    def __init__(self, context: RankContext, folder: Path, model_hash: Future[str] | None) -> None:
        self._context = context
        self._folder = folder
        self._model_hash = model_hash
        self._store: StreamedLayers | None = None

    @property
    def is_open(self) -> bool:
        """True if the rank has layers to stream."""
        return self._store is not None

    def open(self) -> StreamedLayers:
        """Return a new store.

        Raises:
            ExpectedError: the model cannot be read.
        """
        context = self._context
        attempt, device = context.attempt, context.device
        spec = attempt.intent.spec

        def warn(message: str, hint: str) -> None:
            context.journal.write("warning", message=message, hint=hint, of_rank=True)

        sha256 = (
            self._model_hash.result()
            if self._model_hash is not None
            else hash_model(self._folder, attempt.hashes_folder)
        )
        about = {
            "model": sha256,
            "kind": spec.adapter.kind,
            "dtype": str(choose_dtype(spec.precision, device)),
            # Processors of different kinds may round differently.
            "device": device.type,
            **{name: _read_version(name) for name in _PACKAGES},
        }
        # Ranks of one PC share its memory: one copy of the layers if they can, else a part each.
        num_local = attempt.num_local_ranks
        memory = HostMemory(device, choose_budget(num_local), warn)

        def join(places: Sequence[int], slot_bytes: int) -> SharedBlocks | None:
            path = attempt.folder / SHARED_LAYERS_FILE
            blocks = join_blocks(path, places, slot_bytes, lambda: choose_budget(1))
            return blocks if blocks is not None and memory.can_pin(blocks.first_page) else None

        self._store = StreamedLayers(
            device,
            StreamedLayerFiles(attempt.layers_folder, about),
            memory,
            # Quantizing is slow; layers in 16 bits are as fast to read from the model's files.
            keeps_files=spec.adapter.kind == "qlora",
            warn=warn,
            report=partial(context.progress.report, "layers"),
            local=(
                LayerPeers(number=attempt.placement.local_rank, count=num_local, join=join)
                if num_local > 1
                else LayerPeers()
            ),
        )
        return self._store

    def finish(self) -> LayerStream | None:
        """Start streaming; return the stream, or None without one."""
        return None if self._store is None else self._store.finish()


@contextmanager
def warning_of_slow_disk(context: RankContext, reader: DiskReader | None) -> Iterator[None]:
    """Warn if passes inside the block waited for layers from a disk.

    Args:
        context: context of the rank.
        reader: reads its layers; None if no layer is in a file.
    """
    if reader is None:
        yield
        return
    before_s, started_s = reader.waited_s, time.perf_counter()
    yield
    share = (reader.waited_s - before_s) / (time.perf_counter() - started_s)
    if share > _WAITING_SHARE and reader.bytes_per_s:
        context.journal.write(
            "warning",
            message=f"Layers that do not fit into the PC's memory come from its disk at "
            f"{reader.bytes_per_s / 1e9:.1f} GB/s, and this GPU waits for them {share:.0%} of the "
            "time.",
            hint="Close programs on that PC, give it more memory or a faster SSD for the agent's "
            "folder, or raise batch_sequences so that more is computed for each read",
            of_rank=True,
        )


def _read_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
