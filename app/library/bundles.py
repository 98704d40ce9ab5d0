"""Bundle files of the master that nodes need, named by their content.

A bundle's folder on a node is `<kind>/<safe name>-<16 hex digits of the manifest's hash>`. Equal
content has the same name everywhere and is sent once; a changed file makes another bundle.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agents.contract.messages import to_wire
from agents.contract.run import FileEntry
from agents.shared.files.folder_files import ForeignFile, read_regular, require_own
from agents.shared.models.code_references import may_name_code, without_code
from app.errors import UserError
from app.storage.hashes import HashStore


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Source of a run's model or data."""

    value: str
    """Hub id or path on the node, which the trainer gets if there is no bundle."""
    destination: str | None = None
    """Folder of the bundle below the agent's home; None: nothing to send."""
    root: str | None = None
    """Folder on the master that holds the files."""
    files: tuple[FileEntry, ...] = ()
    member: str | None = None
    """File of the bundle that is used; None: the whole folder."""
    cleaned: tuple[str, ...] = ()
    """Names of files that are sent without their references to code; `files` describes the sent
    content."""
    written: tuple[tuple[str, str], ...] = ()
    """Names and ASCII texts of files that are sent but are not in `root`."""

    def path_on_node(self, folder: str) -> str:
        """Return the path for the trainer if the bundle is in `folder` on the node."""
        return folder if self.member is None else f"{folder}/{self.member}"

    def read_cleaned(self) -> dict[str, bytes]:
        """Return the content of the cleaned and the written files by name.

        Raises:
            OSError: a file cannot be read.
        """
        found = {name: text.encode("ascii") for name, text in self.written}
        for name in self.cleaned:
            data = read_regular(Path(self.root or "", name), Path(self.root or ""))
            found[name] = without_code(data) or data
        return found


def make_bundle(
    kind: Literal["models", "data", "artifacts"],
    name: str,
    root: Path,
    files: Iterable[Path],
    hashes: HashStore,
    member: str | None = None,
) -> Source:
    """Hash `files` (below `root`) and name the bundle; only changed files are read.

    Raises:
        UserError: a file cannot be read, is not an ordinary one, or is a link out of `root`.
    """
    entries, cleaned = [], []
    # Sorted, since the order of a folder differs between file systems and would change the name.
    for path in sorted(files):
        _refuse_odd_name(path)
        try:
            require_own(path, root)
            size_bytes, sha256 = path.stat().st_size, hashes.sha256(path)
            # Only configs of models can name code, which the trainer must never run.
            is_checked = kind == "models" and may_name_code(path.name, size_bytes)
            clean = without_code(path.read_bytes()) if is_checked else None
        except ForeignFile as error:
            raise refused(error) from error
        except OSError as error:
            raise UserError(
                f"{path} cannot be read: {error.strerror}", "Repair its permissions."
            ) from error
        relative = path.relative_to(root).as_posix()
        if clean is not None:
            size_bytes, sha256 = len(clean), hashlib.sha256(clean).hexdigest()
            cleaned.append(relative)
        entries.append(FileEntry(path=relative, size_bytes=size_bytes, sha256=sha256))
    manifest = json.dumps(to_wire(entries), sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(manifest.encode()).hexdigest()[:16]
    return Source(
        value=str(root if member is None else root / member),
        destination=f"{kind}/{safe_name(name)}-{digest}",
        root=str(root),
        files=tuple(entries),
        member=member,
        cleaned=tuple(cleaned),
    )


def refused(error: ForeignFile) -> UserError:
    """Return the user's error for a file that is not read."""
    return UserError(error.message, f"{error.hint}.")


def _refuse_odd_name(path: Path) -> None:
    # Linux allows any bytes in a name, but the wire and the manifest are UTF-8.
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError as error:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        raise UserError(
            f"the name of {shown} is not UTF-8, so it cannot be sent to a node", "Rename the file."
        ) from error


def safe_name(text: str) -> str:
    """Return `text` as a valid part of a path on any system.

    >>> safe_name("My chats (v2).jsonl"), safe_name("..")
    ('My-chats-v2-.jsonl', 'x')
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-_")[:60] or "x"
