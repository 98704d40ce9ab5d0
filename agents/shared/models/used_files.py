"""Find the files of a model's folder that training uses, see `agents/contract/model_files.py`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from agents.contract.model_files import MAX_INDEX_BYTES, UsedFiles, choose_files
from agents.shared.files.folder_files import list_own, read_regular


def find_used(folder: Path) -> UsedFiles:
    """Return the names of the used files of a folder.

    Raises:
        OSError: the folder cannot be read.
    """
    names = [path.name for path in folder.iterdir() if not path.is_dir()]
    return choose_files(names, partial(_read, folder))


def list_used(folder: Path) -> list[Path]:
    """Return the used files of a folder, in order.

    Raises:
        ForeignFile: one of them is not an ordinary file, or leads out of the folder.
        OSError: the folder cannot be read.
    """
    return list_own(folder, find_used(folder).names.__contains__)


def list_weights(folder: Path) -> list[Path]:
    """Return the files of the weights that a folder has, in order.

    Raises:
        OSError: the folder cannot be read.
    """
    used = find_used(folder)
    return sorted(folder / name for name in used.weights & used.names)


def _read(folder: Path, name: str) -> bytes | None:
    try:
        return read_regular(folder / name, folder, MAX_INDEX_BYTES)
    except OSError:
        return None
