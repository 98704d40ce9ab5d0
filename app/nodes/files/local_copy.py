"""Copy a folder to another place on this PC, hashing it on the way.

Files are collected in a temporary folder next to the target, which is renamed when it is complete.
An interrupted copy leaves its finished files there, and the next one verifies them instead of
copying them again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from agents.contract.run import FileEntry
from agents.shared.files.full_disk import advise_room, name_disk_error
from app.errors import UserError
from app.nodes.files.local_files import FileWriter, in_thread, publish_folder, read_blocks
from app.nodes.files.transfer import BytesProgress
from app.paths import is_same_folder
from app.storage.hashes import hash_file
from app.text import show_bytes

# Suffix of the file that is being written.
_HALF = ".half"


async def copy_folder(
    root: Path, target: Path, files: Sequence[FileEntry], progress: BytesProgress | None = None
) -> None:
    """Copy `files` (below `root`) to the new folder `target`.

    Raises:
        UserError: `target` exists, the disk is full, or a file has changed.
    """
    temporary = target.with_name(f".{target.name}.part")
    try:
        await in_thread(_make_room, temporary, target, files)
        total, done = sum(entry.size_bytes for entry in files), 0
        for entry in files:
            if not await in_thread(_has, temporary, entry):
                # A suffix, since FileWriter verifies the hash only at its end: a file under its
                # real name is always whole.
                half = replace(entry, path=entry.path + _HALF)
                await in_thread(_forget, temporary / half.path)
                blocks = read_blocks(root, entry.path, entry.size_bytes)
                async with (
                    contextlib.aclosing(blocks),
                    FileWriter(temporary, half, "disk") as writer,
                ):
                    async for block in blocks:
                        await writer.write(block)
                await in_thread(os.replace, temporary / half.path, temporary / entry.path)
            done += entry.size_bytes
            if progress is not None:
                progress(done, total)
        await in_thread(publish_folder, temporary, target)
    except OSError as error:
        raise UserError(
            f"{target} cannot be written: {name_disk_error(error)}",
            f"{advise_room(error)}, or choose a folder that you may write to.",
        ) from error


def _make_room(temporary: Path, target: Path, files: Sequence[FileEntry]) -> None:
    # A file dialog may have created an empty folder. Our working directory cannot be removed.
    if target.is_dir() and not any(target.iterdir()) and not is_same_folder(target, Path()):
        target.rmdir()
    if target.exists():
        raise UserError(f"{target} exists already", "Choose a new folder.")
    temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
    here = sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file())
    needed = sum(entry.size_bytes for entry in files) - here
    free = shutil.disk_usage(temporary).free
    if needed > free:
        # Finished files of an earlier copy stay for the next try.
        if not here:
            temporary.rmdir()
        raise UserError(
            f"{target} needs {show_bytes(needed)}, and {show_bytes(free)} are free there",
            "Free some space on that disk, or choose a folder on another one.",
        )


def _has(folder: Path, entry: FileEntry) -> bool:
    path = folder / entry.path
    return (
        path.is_file()
        and path.stat().st_size == entry.size_bytes
        and (hash_file(path) == entry.sha256)
    )


def _forget(path: Path) -> None:
    path.unlink(missing_ok=True)
