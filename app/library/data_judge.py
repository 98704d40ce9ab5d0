"""Judge rows that this PC can read by what their columns mean, before anything is sent.

The rules are those of the nodes, `agents.shared.data.meaning`; what is refused there is refused
here. What a chat template leaves out only a node knows for certain, since it has the tokenizer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.data import DataFinding
from agents.contract.spec import DataSpec
from agents.shared.data.columns import choose_format, find_rows_inside
from agents.shared.data.findings import (
    MESSAGES,
    RowMeanings,
    place_finding,
    refusals,
    say_refusal,
    sort_findings,
)
from app.errors import UserError

# Rows of one file have places below this, so that a place names file and row.
_FILE_ROWS = 1 << 40
_MAX_TEMPLATE_BYTES = 1 << 20


class RowJudge:
    """Counts what rows mean beyond what is trained.

    Args:
        data: format and ignored columns of the run.
    """

    def __init__(self, data: DataSpec) -> None:
        self._format = str(data.format)
        self._ignored = frozenset(data.ignore_columns)
        self._meanings = RowMeanings(data.ignore_columns)
        self._files: list[Path] = []
        self._number = 0
        self._misfit = ""

    def begin(self, path: Path) -> None:
        """Begin with another file."""
        self._files.append(path)
        self._number = 0

    def add(self, row: Any) -> None:
        """Count the next row of the file; one that is blank or broken counts as a place alone.

        An object around a list of rows counts as these.
        """
        inside = find_rows_inside(row)
        for one in inside if inside is not None else (row,):
            self._number += 1
            if isinstance(one, dict):
                self._judge(one)

    def _judge(self, row: dict[str, Any]) -> None:
        if self._format == "auto":
            try:
                self._format = choose_format(
                    {key: value for key, value in row.items() if key not in self._ignored}
                )
            except ValueError as error:
                self._misfit = self._misfit or f"row {self._number}: {error}"
        if self._format != "auto":
            place = (len(self._files) - 1) * _FILE_ROWS + self._number
            self._meanings.add(row, self._format, place)

    def find(self) -> tuple[DataFinding, ...]:
        """Return what was found, the gravest first."""
        return tuple(self._place(one) for one in self._meanings.find())

    def _place(self, found: DataFinding) -> DataFinding:
        if found.row is None:
            return found
        file, number = divmod(found.row, _FILE_ROWS)
        name = self._files[file].name if len(self._files) > 1 else ""
        return place_finding(found, number, name)

    def refuse(self, name: str) -> None:
        """Refuse data that would be trained wrongly; `name` is its name in the message.

        Raises:
            UserError: it would; the message names column and share. Or no row has a known form.
        """
        if self._format == "auto" and self._misfit:
            raise UserError(
                f"{name} has no usable row: {self._misfit}",
                "Rename its columns; nothing was started.",
            )
        refused = refusals(self.find())
        if refused:
            message, hint = say_refusal(name, refused)
            raise UserError(message, f"{hint}. Nothing was started.")


def settle_by_template(found: Iterable[DataFinding], model: str) -> tuple[DataFinding, ...]:
    """Return findings without the keys of messages for which the model's template has a place.

    Args:
        found: of the data.
        model: of the run; what a folder that is not here would do is not known.
    """
    template = _read_template(Path(model).expanduser())
    if template is None:
        return tuple(found)
    settled = []
    for one in found:
        key = one.column.removeprefix(MESSAGES)
        if key == one.column or one.kind not in ("reasoning", "unknown"):
            settled.append(one)
        elif key not in template:
            settled.append(replace(one, kind="template"))
    return sort_findings(settled)


def _read_template(folder: Path) -> str | None:
    """Return the chat templates of a model's folder as one text; None: there are none here."""
    texts = []
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        for path in (folder / "chat_template.jinja", folder / "tokenizer_config.json"):
            if not path.is_file() or path.stat().st_size > _MAX_TEMPLATE_BYTES:
                continue
            text = path.read_text("utf-8", "replace")
            if path.suffix == ".json":
                text = json.dumps(json.loads(text).get("chat_template") or "")
            texts.append(text)
    return "\n".join(texts) if any(text.strip('" ') for text in texts) else None
