"""Store of a project's test prompts and of models' answers to them."""

from __future__ import annotations

import json

from agents.contract.messages import WireError, from_wire, to_wire
from app.conversation import AnswerComparison, Project
from app.storage.database import Database

MAX_COMPARISONS = 50
"""Maximum number of comparisons kept per project; the oldest are deleted."""


class PromptStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def prompts(self, project: Project) -> tuple[str, ...]:
        """Return the stored prompts of a project; may be empty."""
        rows = self._database.read(
            "SELECT prompts FROM prompt_sets WHERE base = ? AND data = ?",
            (project.base, project.data),
        )
        return tuple(json.loads(rows[0][0])) if rows else ()

    def save_prompts(self, project: Project, prompts: tuple[str, ...]) -> None:
        with self._database.write() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO prompt_sets VALUES (?, ?, ?)",
                (project.base, project.data, json.dumps(prompts)),
            )

    def comparisons(self, project: Project) -> tuple[AnswerComparison, ...]:
        """Return the comparisons, newest first; skip rows of another version."""
        rows = self._database.read(
            "SELECT comparison FROM comparisons WHERE base = ? AND data = ? ORDER BY id DESC",
            (project.base, project.data),
        )
        found = []
        for (text,) in rows:
            try:
                found.append(from_wire(AnswerComparison, json.loads(text)))
            except WireError:
                continue
        return tuple(found)

    def add_comparison(self, project: Project, comparison: AnswerComparison) -> None:
        place = (project.base, project.data)
        with self._database.write() as connection:
            connection.execute(
                "INSERT INTO comparisons (base, data, comparison) VALUES (?, ?, ?)",
                (*place, json.dumps(to_wire(comparison))),
            )
            connection.execute(
                "DELETE FROM comparisons WHERE base = ? AND data = ? AND id NOT IN (SELECT id "
                "FROM comparisons WHERE base = ? AND data = ? ORDER BY id DESC LIMIT ?)",
                (*place, *place, MAX_COMPARISONS),
            )
