"""A real agent says what it has of the master's files, through its connection."""

from __future__ import annotations

import hashlib
from pathlib import Path

from agents.contract.in_place import PlaceAnswer, PlaceQuery
from agents.contract.requests.shared import PlaceQueries
from agents.contract.run import FileEntry
from agents.contract.shares import Share
from tests.fakes.ssh import nodes


async def test_an_agent_answers_each_query_and_keeps_no_copy(tmp_path: Path) -> None:
    data = b'{"text": "x"}\n'
    (tmp_path / "rows.jsonl").write_bytes(data)
    sha256 = hashlib.sha256(data).hexdigest()

    def ask(share: Share | None, sha256: str = sha256) -> PlaceQuery:
        entry = FileEntry(path="rows.jsonl", size_bytes=len(data), sha256=sha256)
        return PlaceQuery(
            is_model=False, paths=(str(tmp_path),), share=share, files=(entry,), member="rows.jsonl"
        )

    nas = Share(kind="nfs", server="nas", path="/rows")
    async with nodes(tmp_path, 1) as (pc,):
        # Nothing is shared as far as anybody knows: not even looked for.
        found = await pc.ask(PlaceQueries(queries=(ask(None),)))
        assert found.answers == (PlaceAnswer(),)
        found = await pc.ask(PlaceQueries(queries=(ask(nas), ask(nas, "0" * 64))))
        same, other = found.answers
        assert same.path == str(tmp_path / "rows.jsonl")
        assert other.path is None
        assert other.problem == f"{tmp_path / 'rows.jsonl'} has different content"
        home = tmp_path / "pc-0" / ".local/share/rackless-agent"
        assert not list(home.glob("data/*"))
        assert not list(home.glob(".job-*"))
