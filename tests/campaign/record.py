"""The file of a campaign: written after each run, and read to go on after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.campaign.table import Campaign, Session
from tests.campaign.verdict import Finding


class Record:
    """What a campaign has found so far."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], session: Session) -> None:
        """Go on with the campaign of a file, or begin one.

        Args:
            path: the file; None: nothing is stored.
            settings: all that decides which faults are drawn.
            session: this call.

        Raises:
            SystemExit: the file holds a campaign of other settings.
        """
        self._path = path
        self.campaign = Campaign(settings=settings, sessions=(session,))
        if path is not None and path.exists():
            stored = Campaign.from_dict(json.loads(path.read_text()))
            if stored.settings != settings:
                raise SystemExit(
                    f"{path} holds another campaign ({_show(stored.settings)}). Give these "
                    f"settings again, or another file: --out FILE"
                )
            self.campaign = replace(stored, sessions=(*stored.sessions, session))

    @property
    def findings(self) -> tuple[Finding, ...]:
        return self.campaign.findings

    def add(self, found: Iterable[Finding]) -> None:
        """Add findings and store all: a crash at any moment leaves the older file or this one."""
        self.campaign = replace(self.campaign, findings=(*self.findings, *found))
        if self._path is not None:
            beside = self._path.with_name(f"{self._path.name}.new")
            beside.write_text(json.dumps(self.campaign.as_dict(), indent=1))
            beside.replace(self._path)


def _show(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != "kinds")
