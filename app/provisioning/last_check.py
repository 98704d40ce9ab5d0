"""Keep the rows of the last check, for reports to whoever helps."""

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
    """Write the rows into a private file; a disk that takes none loses them, which is said."""
    found = {"time_s": time.time(), "rows": [to_wire(row) for row in rows]}
    try:
        replace_text(path, json.dumps(found, indent=1) + "\n")
    except OSError as error:
        _log.warning("the rows of the check were not kept: %s", error)
