"""Columns of the table of rows of data."""

from __future__ import annotations

from agents.contract.requests.rows import RowBrief
from app.gui.tables.rows_model import Column, number_column
from app.presentation.rows_text import STATE_WORDS, describe_state, show_length
from app.telemetry.state import Status, Tone

_TONES: dict[str, Tone] = {"left_out": "error", "cut": "warning", "duplicate": "calm"}


def _mark(row: RowBrief) -> Status:
    return Status(_TONES.get(row.state, "good"), STATE_WORDS[row.state])


def data_columns() -> list[Column[RowBrief]]:
    return [
        number_column("Row", lambda row: row.row, "{:,}".format, width_px=68),
        Column(
            title="State",
            text=describe_state,
            status=_mark,
            tip="Whether a run learns this row",
            width_px=106,
        ),
        number_column("Tokens", lambda row: row.num_tokens, show_length, width_px=74),
        number_column(
            "Learned",
            lambda row: row.num_targets,
            show_length,
            width_px=78,
            tip="Number of tokens that are learned",
        ),
        Column(title="Text", text=lambda row: row.text or row.reason, stretches=True, width_px=96),
        Column(title="File", text=lambda row: row.file, width_px=110),
    ]
