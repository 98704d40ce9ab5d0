"""Store the rows of the last check, for support reports."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from agents.contract.messages import to_wire
from app.paths import replace_text
from app.provisioning.check_row import CheckRow

_log = logging.getLogger(__name__)


def store_last_check(path: Path, rows: Sequence[CheckRow]) -> None:
    """Write the rows to a private file; a full disk loses them, which is only logged."""
    found = {"time_s": time.time(), "rows": [to_wire(row) for row in rows]}
    try:
        replace_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        _log.warning("the rows of the check were not kept: %s", error)
