"""A run whose master is gone and whose node loses power, on three loopback nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.nodes.transport.loopback import power_cut
from tests.fakes.site import Site, open_site, tagged_processes, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.campaign, pytest.mark.timeout(300)]
NODES = ("alpha", "beta", "gamma")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_site(tmp_path, NODES) as opened:
        yield opened


def test_nodes_go_on_without_a_master_and_it_understands_what_they_did(site: Site) -> None:
    site.answer("settings", "set", "lost_after_s", "3")
    # The command ends once the run is launched, and with it the only master.
    run_id = site.answer("start", str(site.write_run_file(100_000, recovery="resume")))["run_id"]
    wait_until(lambda: len(site.steps_told("beta", run_id, 1)) >= 12, "twelve steps")
    power_cut(site.node_home("alpha"))  # with rank 0, the store of the ranks and a checkpoint
    steps = wait_until(lambda: site.steps_told("beta", run_id, 0, attempt=2), "steps without it")
    intents = [
        json.loads((site.attempt(name, run_id, 2) / "intent.json").read_text())
        for name in NODES[1:]
    ]
    assert [place["node"] for place in intents[0]["ranks"]] == ["beta", "gamma"]
    # From the checkpoint that only alpha and beta had saved: no sample is left out or repeated.
    assert steps[0] == intents[0]["resume_step"] + 1 == intents[1]["resume_step"] + 1 > 5
    done = set(site.steps_told("beta", run_id, 1))
    assert set(range(1, steps[0])) <= done

    shown = site.answer("runs", "show", run_id)
    assert (shown["state"], shown["attempt"], shown["nodes"]) == ("running", 2, ["beta", "gamma"])
    (told,) = [e["text"] for e in shown["events"] if "without this PC" in e["text"]]
    assert told.startswith("beta started attempt 2 without this PC, on beta and gamma: alpha was")
    refused = site.rackless("runs", "resume", run_id)
    assert (refused.code, "cannot be resumed" in refused.problem) == (1, True), (
        "it never runs twice"
    )

    assert site.answer("runs", "stop", run_id)["state"] == "stopped"
    assert tagged_processes(run_id) == []
    wait_until(lambda: not election_processes(run_id), "no process beside the run", 5)


def election_processes(run_id: str) -> list[Path]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue
        if b"election" in words and any(run_id.encode() in word for word in words):
            found.append(entry)
    return found
