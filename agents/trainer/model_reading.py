"""Read the model's files while torch is imported, and hash them.

The import takes seconds in which the disk is almost idle, and the weights are read right after it.
A thread that needs only the standard library reads them once: it hashes files without a cached
hash, and reads the others into the page cache, if all fit into memory and the run will not use
quantized layers of an earlier one instead. Weights are not loaded during tokenization, because the
limits of chat templates apply to the whole process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from agents.contract.parallel import find_mode
from agents.errors import ExpectedError
from agents.file_hashes import is_cached
from agents.limits import read_available_bytes
from agents.shared.files.folder_files import open_regular
from agents.shared.models.used_files import list_weights
from agents.trainer.checkpoint.fingerprint import hash_model
from agents.trainer.model_view import is_outline
from agents.trainer.rank.attempt import RankAttempt

# Number of threads that read files, as many as those that hash.
_NUM_READERS = 4
_BLOCK_BYTES = 1 << 20
# Largest fraction of the available memory for files that are read ahead.
_CACHE_SHARE = 0.7


def start_reading(attempt: RankAttempt) -> Future[str] | None:
    """Start to read the model; return its future hash.

    None if another rank of this node reads the model, or if it has to be downloaded first.
    """
    folder = Path(attempt.intent.model_path)
    if attempt.placement.local_rank != 0 or not folder.is_dir():
        return None
    model_hash: Future[str] = Future()

    def read() -> None:
        try:
            # Before the hash, after which all files would be known.
            files = [path for path in list_weights(folder) if not is_outline(path)]
            known = [path for path in files if is_cached(path, attempt.hashes_folder)]
            model_hash.set_result(hash_model(folder, attempt.hashes_folder))
        except Exception as error:  # noqa: BLE001 - raised where the hash is needed
            model_hash.set_exception(error)
            return
        if _streams_quantized(attempt):
            return
        with suppress(OSError):  # loading the model reports this better
            num_bytes = sum(path.stat().st_size for path in known)
            if num_bytes < _CACHE_SHARE * read_available_bytes():
                read_ahead(known)

    # A daemon: the process need not wait for read-ahead.
    threading.Thread(target=read, name="model", daemon=True).start()
    return model_hash


def _streams_quantized(attempt: RankAttempt) -> bool:
    """Return whether layers come from files that an earlier run has most likely written."""
    intent = attempt.intent
    return find_mode(intent.parallel).streams and intent.spec.adapter.kind == "qlora"


def read_ahead(paths: Sequence[Path]) -> None:
    """Read files into the page cache."""
    with ThreadPoolExecutor(_NUM_READERS) as pool:
        for path in paths:
            pool.submit(_read, path)


def _read(path: Path) -> None:
    block = bytearray(_BLOCK_BYTES)
    with suppress(OSError, ExpectedError), open_regular(path) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while file.readinto(block):
            pass
