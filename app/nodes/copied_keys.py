"""Keep the lines that Rackless has added to `authorized_keys` of other PCs, to take them back."""

from __future__ import annotations

import json
from pathlib import Path

from app.errors import UserError
from app.filelock import locked
from app.nodes.node import SshAddress
from app.paths import replace_text

FILE_NAME = "copied_keys.json"


class CopiedKeys:
    """The list below one home folder. Reads the file at each call: others may change it."""

    def __init__(self, home: Path) -> None:
        self._path = home / FILE_NAME

    def find(self, address: SshAddress) -> str | None:
        """Return the line that was added for an account; None: none was."""
        return self._read().get(_account(address))

    def keep(self, address: SshAddress, line: str) -> None:
        self._change(address, line)

    def forget(self, address: SshAddress) -> None:
        self._change(address, None)

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _change(self, address: SshAddress, line: str | None) -> None:
        try:
            with locked(self._path.with_name(f"{FILE_NAME}.lock")):
                lines = self._read()
                lines.pop(_account(address), None)
                if line is not None:
                    lines[_account(address)] = line
                replace_text(self._path, json.dumps(lines, indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"{self._path} cannot be written: {error.strerror or error}",
                "Free some space on that disk, or give yourself write access to that folder",
            ) from error


def _account(address: SshAddress) -> str:
    return f"{address.user}@{address.known_as}"
