"""Journals, lists of files and names that nodes send."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import strategies as st

from agents.contract.names import is_safe_name
from agents.contract.run_layout import is_stream
from app.errors import UserError
from app.nodes.files.remote_files import find_clash, is_safe_path
from app.paths import Paths
from app.runs.journals.history import RunHistory
from app.text import one_line, show_foreign
from tests.hostile.fuzzing import Target, mutated

LINES = (
    b'{"kind": "started", "step": 0, "total_steps": 9, "world_size": 2, "shares": [0.5, 0.5]}\n',
    b'{"kind": "step", "step": 1, "time_s": 1.7e9, "loss": 2.5, "step_s": 0.1, "tokens": 5}\n',
    b'{"kind": "checkpoint", "step": 1, "seconds": 0.5, "stall_s": 0.1}\n',
    b'{"kind": "trace", "first_step": 1, "file": "trace-00000001-rank-0.json.gz", "top": [{}]}\n',
    b'{"kind": "certificate", "promise": "A", "steps": 3, "largest_difference": 0.0}\n',
    b'{"kind": "preview", "num_tokens": 5, "num_targets": 3, "rows": []}\n',
    b'{"kind": "rank_exited", "rank": 0, "exit_code": -9}\n',
)


def _read_journal(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "attempts" / "1" / "pc"
        part.mkdir(parents=True)
        for name in ("rank-0.jsonl", "supervisor.jsonl"):
            (part / name).write_bytes(data)
        history = RunHistory("r-1", Path(folder))
        history.refresh()
        history.steps()
        for event in history.events:
            event.text.encode("utf-8")


def _make_path(name: str) -> None:
    paths = Paths(Path("/home/anna/rackless"))
    made = paths.stream(name, 1, "pc", "rank-0.log")
    assert made.parents[4] == paths.home / "runs"
    assert is_safe_name(name)
    made = paths.stream("r-1", 1, name, "rank-0.log")
    assert made.parents[1] == paths.attempt("r-1", 1)


def _join(name: str) -> None:
    if is_safe_path(name) and not find_clash([name]):
        target = Path("/out")
        assert target in (target / name).resolve().parents
    if is_stream(name):
        assert is_safe_name(name)


def _show(text: str) -> None:
    for shown in (one_line(text), show_foreign(text)):
        shown.encode("utf-8")
        assert "\x1b" not in shown
        assert "\n" not in shown


NAMES = st.one_of(
    st.text(max_size=12),
    st.text(alphabet="./\\-_abr0:1", max_size=12),
    st.sampled_from(["rank-0.log", "..", "r-1", "nul", "a/b"]),
)
TARGETS = (
    Target(
        name="journals",
        inputs=st.lists(mutated(LINES), max_size=4).map(b"".join),
        read=_read_journal,
        allowed=(),
    ),
    Target(name="names that become paths", inputs=NAMES, read=_make_path, allowed=(UserError,)),
    Target(name="paths of files of a node", inputs=NAMES, read=_join, allowed=()),
    Target(
        name="texts that are shown",
        inputs=st.text(alphabet=st.characters(), max_size=30),
        read=_show,
        allowed=(),
    ),
)
