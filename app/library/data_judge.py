"""Judge the meaning of rows' columns on this PC, before anything is sent.

The rules are those of the nodes, `agents.shared.data.meaning`. Only a node knows for certain which
keys a chat template leaves out, since it has the tokenizer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.data import DataFinding
from agents.contract.spec import DataSpec, RunSpec
from agents.shared.data import findings
from agents.shared.data.columns import THOUGHT_KEYS, choose_format
from agents.shared.data.known_templates import KNOWN
from agents.shared.data.offers import offer_mapping
from agents.shared.data.reshape import ColumnMapping, explain_reading, unfold
from app.errors import UserError

# Limit of row numbers in a file; a place is file index times this plus row number.
_FILE_ROWS = 1 << 40
_MAX_TEMPLATE_BYTES = 1 << 20


class RowJudge:
    """Collector of findings about columns that are not trained, or have another meaning.

    Args:
        data: format and ignored columns of the run.
        beyond: tokens for which the model has no weights.
    """

    def __init__(self, data: DataSpec, beyond: Sequence[str] = ()) -> None:
        self.encoding: str = data.encoding
        """Encoding of text files."""
        self._format = str(data.format)
        self._ignored = frozenset(data.ignore_columns)
        self._meanings = findings.RowMeanings(data.ignore_columns, beyond)
        self._mapping = ColumnMapping(data.columns)
        self._files: list[Path] = []
        self._number = 0
        self._may_wrap = False
        self._held: list[dict[str, Any]] = []
        self._misfit = self._offer = self._reading = ""

    def begin(self, path: Path, *, may_wrap: bool = True) -> None:
        """Begin the next file; its only object may be a wrapper if `may_wrap`."""
        self._release()
        self._files.append(path)
        self._number = 0
        self._may_wrap = may_wrap and path.suffix.lower() == ".json"

    def begin_list(self) -> None:
        """Begin the list of rows of the file: an object in a list is a row, not a wrapper."""
        self._may_wrap = False

    def takes(self, row: Any) -> bool:
        """Return whether a value can be a row: an object, or a list if columns are mapped."""
        return isinstance(row, dict) or (isinstance(row, list) and bool(self._mapping.columns))

    def add(self, row: Any) -> None:
        """Judge the next row of the file; None or any other value only advances its number.

        The only object of a `.json` file may be a wrapper around its rows.
        """
        may_wrap = self._may_wrap and isinstance(row, dict)
        if may_wrap and not self._number and not self._held:
            self._held.append(row)
            return
        held, self._held = self._held, []
        for item in (*held, row):
            self._judge(item)

    def _release(self) -> None:
        """Judge a row that was held because it may be a wrapper."""
        held, self._held = self._held, []
        for _, row in unfold(enumerate(iter(held), start=1)):
            self._judge(row)

    def _judge(self, row: Any) -> None:
        self._number += 1
        if isinstance(row, (dict, list)) and not self._mapping.leave_out(row):
            try:
                shaped = self._mapping.apply(row)
            except ValueError as error:
                self._misfit = self._misfit or f"row {self._number}: {error}"
                return
            self._judge_shaped(shaped if isinstance(shaped, dict) else {}, row)

    def _judge_shaped(self, row: dict[str, Any], given: Any) -> None:
        if self._format == "auto":
            try:
                kept = {key: value for key, value in row.items() if key not in self._ignored}
                self._format = choose_format(kept)
                if isinstance(given, dict):
                    self._reading = explain_reading(given, kept, self._format)
            except ValueError as error:
                self._misfit = self._misfit or f"row {self._number}: {error}"
                self._offer = self._offer or offer_mapping(given)
        if self._format != "auto":
            place = (len(self._files) - 1) * _FILE_ROWS + self._number
            self._meanings.add(row, self._format, place)

    @property
    def is_text(self) -> bool:
        """True if the rows are plain texts."""
        return self._format == "text"

    def find(self) -> tuple[DataFinding, ...]:
        """Return the findings, the gravest first."""
        self._release()
        found = tuple(self._place(one) for one in self._meanings.find())
        return (*found, *findings.describe_reading(self._reading, self._number))

    def _place(self, found: DataFinding) -> DataFinding:
        if found.row is None:
            return found
        file, number = divmod(found.row, _FILE_ROWS)
        name = self._files[file].name if len(self._files) > 1 else ""
        return findings.place_finding(found, number, name)

    def refuse(self, name: str) -> None:
        """Refuse data that would be trained wrongly; `name` is its name in the message.

        Raises:
            UserError: no row has a known format, or a column would be trained wrongly.
        """
        self._release()
        if self._format == "auto" and self._misfit:
            hint = f"Set {self._offer}, or rename" if self._offer else "Rename"
            raise UserError(
                f"{name} has no usable row: {self._misfit}",
                f"{hint} its columns; nothing was started.",
            )
        refused = findings.refusals(self.find())
        if refused:
            message, hint = findings.say_refusal(name, refused)
            raise UserError(message, f"{hint}. Nothing was started.")


def settle_by_template(found: Iterable[DataFinding], spec: RunSpec) -> tuple[DataFinding, ...]:
    """Return findings without those about message keys that the run's chat template uses.

    Args:
        found: findings of the data.
        spec: run spec.
    """
    own = spec.data.chat_template
    template = KNOWN.get(own, own) if own else _read_template(Path(spec.model).expanduser())
    if template is None:
        return tuple(found)  # the folder is not on this PC, so its template is unknown
    settled = []
    for one in found:
        key = one.column.removeprefix(findings.MESSAGES)
        if one.kind == "tooled":
            if template and "tool" not in template:
                settled.append(replace(one, kind="no_tools", consequence="refuse"))
        elif one.kind == "thought":
            # Transformers gives a thought to the template under each of these names.
            if not any(name in template for name in THOUGHT_KEYS):
                settled.append(replace(one, kind="template", consequence="warn"))
        elif key == one.column or one.kind not in ("reasoning", "unknown"):
            settled.append(one)
        elif key not in template:
            settled.append(replace(one, kind="template"))
    return findings.sort_findings(settled)


def _read_template(folder: Path) -> str | None:
    """Return the chat templates of a model's folder as one text, or None."""
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
