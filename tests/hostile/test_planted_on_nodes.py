"""Folders that were put into a real agent's home, while its run trains on two loopback nodes."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.site import Site, open_site, slowed, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OTHER = "20260101-000000-abc"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as opened:
        yield opened


def plant(site: Site, run_id: str, source: Path, attempt: int, **changes: Any) -> None:
    """Put a changed copy of the genuine attempt into beta's folders."""
    folder = site.attempt("beta", run_id, attempt)
    shutil.copytree(source, folder)
    intent = json.loads((folder / "intent.json").read_text())
    intent = {**intent, "run_id": run_id, "attempt": attempt, **changes}
    (folder / "intent.json").write_text(json.dumps(intent))


def test_planted_folders_are_listed_and_change_nothing(
    site: Site, tmp_path: Path, attack: Any
) -> None:
    diary = tmp_path / "diary.txt"
    diary.write_text("dear diary\n" * 9)
    run_id = site.answer("start", str(site.write_run_file(300)))["run_id"]
    genuine = site.attempt("beta", run_id)
    with slowed(run_id):
        wait_until(lambda: site.steps_told("alpha", run_id, 0), "a step")
        spec = json.loads((genuine / "intent.json").read_text())["spec"]
        spec = {**spec, "data": {**spec["data"], "train": str(diary)}}
        plant(site, OTHER, genuine, 1, spec=spec, train_path=str(diary))
        plant(site, run_id, genuine, 7, spec=spec)
        shown: dict[tuple[str, int], Any] = {}
        with site.start("watch", "--json") as watch:
            assert watch.stdout is not None
            while not {(OTHER, 1), (run_id, 7)} <= shown.keys():
                told = json.loads(watch.stdout.readline())
                if told["kind"] == "found":
                    shown[told["run_id"], told["attempt"]] = told
            watch.send_signal(signal.SIGTERM)
            watch.communicate()
        assert {one["node"] for one in shown.values()} == {"beta"}
        assert str(diary) in shown[OTHER, 1]["files"]
        run = site.answer("runs", "show", run_id)
        assert (run["state"], run["attempt"], run["nodes"]) == ("running", 1, ["alpha", "beta"])
        assert [one["run_id"] for one in site.answer("runs", "list")] == [run_id]
        refused = site.rackless("runs", "adopt", OTHER)
        assert refused.code == 1
        assert str(diary) in refused.problem
        assert site.answer("runs", "stop", run_id)["state"] == "stopped"
    assert {path.name for path in (site.home / "runs").iterdir()} == {run_id}
    sent = [p for name in ("alpha", "beta") for p in site.agent_home(name).rglob("diary*")]
    assert not sent
    attack(given="attempts/7 and a run with a diary on beta", tried="watch", happened=str(shown))
