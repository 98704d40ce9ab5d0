"""Journals become steps, ranks and sentences, whatever was cut off, doubled or never written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agents.contract.run import RankPlacement
from agents.contract.spec import DataSpec, RunSpec
from app.presentation.start_text import describe_start
from app.runs.journals.event_text import describe_line
from app.runs.journals.history import RunHistory
from app.runs.journals.journal import JournalTail, shares_of, step_record
from app.runs.snapshot import make_snapshot
from app.storage.runs import RunRecord
from app.telemetry.step_parts import describe_split, show_rank_memory, split_step
from app.text import DASH


def step(number: int, loss: float = 2.0, **more: Any) -> dict[str, Any]:
    line = {
        "kind": "step",
        "time_s": 100.0 + number,
        "step": number,
        "loss": loss,
        "learning_rate": 1e-3,
        "gradient_norm": 0.5,
        "tokens": 30,
        "global_tokens": 100,
        "step_s": 0.5,
        "compute_s": 0.3,
        "wait_s": 0.1,
        "tokens_per_s": 60.0,
        "memory_bytes": 1000,
    }
    return {**line, **more}


class Journals:
    """Writes journals as mirrors of nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, node: str, stream: str, *lines: dict[str, Any] | bytes, attempt: int = 1) -> None:
        path = self.folder / "attempts" / str(attempt) / node / stream
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            for line in lines:
                file.write(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n")


@pytest.fixture
def journals(tmp_path: Path) -> Journals:
    return Journals(tmp_path)


@pytest.fixture
def history(tmp_path: Path) -> RunHistory:
    return RunHistory("r", tmp_path)


def test_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = JournalTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"')
    assert tail.read() == [{"kind": "a"}]
    assert tail.read() == []
    path.write_bytes(b'{"kind":"a"}\n{"kind":"b"}\n')
    assert tail.read() == [{"kind": "b"}]


def test_broken_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'nonsense\n[1]\n{"no":"kind"}\n{"kind":3}\n\xff\xfe\n\n{"kind":"good"}\n')
    assert JournalTail(path).read() == [{"kind": "good"}]


def test_long_journal_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.runs.journals.journal.MAX_READ_BYTES", 64)
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b"".join(b'{"kind":"k","n":%d}\n' % n for n in range(500)))
    assert [line["n"] for line in JournalTail(path).read()] == list(range(500))


def test_step_record_has_the_speed_of_all_ranks() -> None:
    record = step_record(step(7), 2)
    assert record is not None
    assert (record.attempt, record.step, record.tokens_per_s, record.wait_s) == (2, 7, 200.0, 0.1)


def test_odd_values_become_unknown_but_a_diverged_loss_shows() -> None:
    record = step_record(step(1, loss=math.nan, step_s=0, learning_rate="x", wait_s=True), 1)
    assert record is not None
    assert math.isnan(record.loss or 0.0)
    assert (record.tokens_per_s, record.learning_rate, record.wait_s) == (None, None, None)
    assert step_record({"kind": "step"}, 1) is None


def test_step_record_has_the_metrics_of_its_objective() -> None:
    record = step_record(step(7, reward_margin=1.5, reward_accuracy=math.inf, other=1.0), 1)
    assert record is not None
    assert record.metrics == {"reward_margin": 1.5}
    plain = step_record(step(7), 1)
    assert plain is not None
    assert plain.metrics == {}
    assert step_record({"kind": "phase", "step": 1}, 1) is None


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([1, 3], (0.25, 0.75)), ([], ()), (None, ()), ([0, 0], ()), ([1, "x"], ()), ([1, -1], ())],
)
def test_shares(shares: object, expected: tuple[float, ...]) -> None:
    assert shares_of({"kind": "started", "shares": shares}) == expected


@pytest.mark.parametrize(
    ("line", "rank", "severity", "text"),
    [
        (
            {"kind": "started", "step": 0, "total_steps": 9, "world_size": 3},
            0,
            "info",
            "training started after step 0 of 9 on 3 ranks",
        ),
        (
            {"kind": "started", "num_skipped": 2, "skipped": [{"row": 4, "reason": "empty"}]},
            0,
            "warning",
            "training started after step 0; 2 rows of the data skipped (row 4: empty)",
        ),
        (
            {"kind": "preview", "format": "chat", "num_rows": 9, "num_skipped": 1,
             "num_tokens": 4096, "num_targets": 1024, "fill": 0.98},
            0,
            "info",
            "data format chat: 8 usable rows, 4,096 tokens, 1,024 of them trained on, packed to "
            "98 %",
        ),
        (
            {"kind": "setting", "compiled": True, "micro_tokens": 4096, "num_layers": 32,
             "num_recomputed": 18, "num_moved": 12},
            0,
            "info",
            "rank 0 on alpha uses micro-batches of up to 4,096 tokens and compiled layers; of 32 "
            "layers, 18 recompute their activations and 12 offload them to the PC's memory",
        ),
        (
            {"kind": "setting", "compiled": False, "micro_tokens": 4096, "num_layers": 80,
             "num_streamed": 70, "num_from_disk": 32},
            0,
            "info",
            "rank 0 on alpha uses micro-batches of up to 4,096 tokens; of 80 layers, 70 are "
            "streamed from the PC (32 from its disk)",
        ),
        (
            {"kind": "setting", "compiled": True, "micro_tokens": 4096, "num_layers": 32, "step": 9,
             "believed_tokens_per_s": 900.0, "measured_tokens_per_s": None},
            0,
            "info",
            "rank 0 on alpha uses micro-batches of up to 4,096 tokens and compiled layers, since a "
            "checkpoint came before another setting had been measured",
        ),
        (
            {"kind": "setting", "compiled": True, "micro_tokens": 4096, "num_layers": 32, "step": 5,
             "believed_tokens_per_s": 31620.0, "measured_tokens_per_s": 5089.0},
            1,
            "info",
            "rank 1 on alpha corrected its setting: the last one reached 5,089 of 31,620 expected "
            "tokens/s. It now uses micro-batches of up to 4,096 tokens and compiled layers",
        ),
        (
            {"kind": "warning", "message": "Memory ran out.", "hint": "", "of_rank": True},
            1,
            "warning",
            "rank 1 on alpha: Memory ran out.",
        ),
        (
            {"kind": "failed", "message": "rank 1 (node alpha, cpu) lost its connection."},
            1,
            "error",
            "rank 1 (node alpha, cpu) lost its connection.",
        ),
        (
            {"kind": "warning", "message": "No end.", "hint": "Wait", "of_rank": "yes"},
            1,
            "warning",
            "No end. Wait",
        ),
        (
            {"kind": "checkpoint", "step": 8, "seconds": 0.25},
            1,
            "info",
            "checkpoint of step 8 saved in 250 ms",
        ),
        ({"kind": "eval", "step": 8, "loss": 1.5}, 0, "info",
         "evaluation after step 8: loss 1.500"),
        ({"kind": "rounded", "features": 0.0056, "gradients": 0.0061}, 0, "info",
         "rank 0 on alpha sends 8 bits, which changes features by 0.56 % and gradients by 0.61 %"),
        ({"kind": "finished", "step": 9, "reason": "completed"}, 0, "info",
         "training finished after step 9"),
        ({"kind": "finished", "step": 5, "reason": "stopped"}, 0, "info",
         "training stopped after step 5"),
        ({"kind": "failed", "message": "boom"}, 2, "error", "rank 2 on alpha: boom"),
        ({"kind": "stalled", "message": "rank 1 stands still"}, None, "error",
         "rank 1 stands still"),
        ({"kind": "standing", "message": "Rank 1 has stood still."}, None, "warning",
         "Rank 1 has stood still."),
        ({"kind": "moving"}, None, "info", "the ranks on alpha continue"),
        ({"kind": "slept", "duration_s": 600.0, "message": "Node b slept."}, None, "warning",
         "Node b slept. Training stood still for these 10 min."),
        ({"kind": "disk", "lacks": "bytes"}, None, "warning",
         "the disk of alpha is full; training continues, but its logs may have gaps: free some "
         "space there"),
        ({"kind": "disk", "lacks": ""}, None, "info", "the disk of alpha has room again"),
        ({"kind": "clock_set", "by_s": -3600.0}, None, "info",
         "the clock of alpha was set back by 1 h"),
        ({"kind": "adopted", "pid": 77, "ranks": [0, 1]}, None, "warning",
         "the run's supervisor on alpha was killed and replaced by process 77; rank 0 and 1 "
         "continued meanwhile"),
        ({"kind": "rank_exited", "rank": 1, "exit_code": -9}, None, "warning",
         "rank 1 on node alpha was ended by signal 9"),
        ({"kind": "rank_exited", "rank": 1, "exit_code": 3,
          "how": "ended with exit code 3 in phase loading"}, None, "warning",
         "rank 1 on node alpha ended with exit code 3 in phase loading"),
        ({"kind": "peer_request", "sender": "beta", "request": "fetch", "is_refused": True,
          "message": "The part of alpha is active."}, None, "warning",
         "alpha refused the request `fetch` of beta: The part of alpha is active"),
        ({"kind": "peer_request", "sender": "beta", "request": "launch", "is_refused": False,
          "message": "for attempt 2"}, None, "info",
         "alpha carried out the request `launch` of beta: for attempt 2"),
    ],
)  # fmt: skip
def test_what_a_line_tells_in_plain_words(
    line: dict[str, Any], rank: int | None, severity: str, text: str
) -> None:
    told = describe_line(line, "run", 1, "alpha", rank)
    assert told is not None
    assert (told.event.severity, told.event.text) == (severity, text)
    kind = {
        "eval": "evaluated",
        "preview": "data_read",
        "standing": "stalled",
        "moving": "stalled",
        "rounded": "note",
        "peer_request": "recovery",
    }.get(line["kind"], line["kind"])
    assert told.event.kind == kind


@pytest.mark.parametrize(
    ("line", "rank"),
    [
        ({"kind": "step", "step": 1}, 0),
        ({"kind": "setting", "compiled": False, "micro_tokens": 4096, "num_layers": 4}, 0),
        ({"kind": "rank_exited", "rank": 0, "exit_code": 0}, None),
        ({"kind": "stalled"}, 0),
        ({"kind": "unheard of"}, 0),
    ],
)
def test_lines_that_need_no_sentence(line: dict[str, Any], rank: int | None) -> None:
    assert describe_line(line, "run", 1, "alpha", rank) is None


def test_steps_of_all_ranks_are_told_once(history: RunHistory, journals: Journals) -> None:
    journals.add("alpha", "rank-0.jsonl", step(1), step(2))
    journals.add("beta", "rank-1.jsonl", step(1), step(2), step(3))
    news = history.refresh()
    assert [record.step for record in news.steps] == [1, 2, 3]
    assert [record.step for record in history.steps()] == [1, 2, 3]
    assert history.refresh().changed is False


def test_events_that_all_ranks_tell_come_once_and_own_ones_each(
    history: RunHistory, journals: Journals
) -> None:
    for rank in (0, 1):
        journals.add(
            "alpha",
            f"rank-{rank}.jsonl",
            {"kind": "checkpoint", "step": 5, "time_s": 2.0},
            {"kind": "failed", "message": "x", "time_s": 3.0},
        )
    assert [event.text for event in history.refresh().events] == [
        "checkpoint of step 5 saved",
        "rank 0 on alpha: x",
        "rank 1 on alpha: x",
    ]


def test_steps_after_the_resumed_checkpoint_are_void(
    history: RunHistory, journals: Journals
) -> None:
    journals.add("alpha", "rank-0.jsonl", *(step(n, loss=1.0) for n in range(1, 8)))
    journals.add(
        "beta",
        "rank-0.jsonl",
        {"kind": "started", "step": 5, "total_steps": 9},
        step(6, loss=2.0),
        attempt=2,
    )
    history.refresh()
    kept = [(record.attempt, record.step) for record in history.steps()]
    assert kept == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 6)]


def test_second_resume_from_further_back_voids_both(
    history: RunHistory, journals: Journals
) -> None:
    journals.add("a", "rank-0.jsonl", *(step(n) for n in range(1, 10)))
    for attempt, start in ((2, 6), (3, 3)):
        lines = ({"kind": "started", "step": start}, step(start + 1))
        journals.add("a", "rank-0.jsonl", *lines, attempt=attempt)
    history.refresh()
    kept = [(record.attempt, record.step) for record in history.steps()]
    assert kept == [(1, 1), (1, 2), (1, 3), (3, 4)]


def test_a_checkpoint_that_a_later_attempt_went_back_behind_is_void(
    history: RunHistory, journals: Journals
) -> None:
    assert history.newest_checkpoint() is None
    saved = ({"kind": "checkpoint", "step": step} for step in (5, 10))
    journals.add("a", "rank-0.jsonl", {"kind": "started", "step": 0}, *saved)
    history.refresh()
    assert history.newest_checkpoint() == 10
    journals.add("a", "rank-0.jsonl", {"kind": "started", "step": 5}, attempt=2)
    history.refresh()
    assert history.newest_checkpoint() == 5
    journals.add("a", "rank-0.jsonl", {"kind": "checkpoint", "step": 8}, attempt=2)
    history.refresh()
    assert history.newest_checkpoint() == 8
    journals.add("a", "rank-0.jsonl", {"kind": "started", "step": 0}, attempt=3)
    history.refresh()
    assert history.newest_checkpoint() is None, "it began anew"


def test_checkpoint_is_told_once_every_copy_is_saved(
    history: RunHistory, journals: Journals
) -> None:
    """It was told with one copy of two, while the other node's disk was full."""
    full = "The disk of node beta is full."
    saved = [{"kind": "checkpoint", "step": step, "copies": 2} for step in (5, 10, 15)]
    failed = [
        {"kind": "warning", "message": full, "hint": "Free at least 1 MB"},
        *({"kind": "checkpoint_failed", "step": s, "message": full, "repeated": True}
          for s in (10, 15)),
    ]  # fmt: skip
    journals.add("alpha", "rank-0.jsonl", *saved)
    journals.add("beta", "rank-1.jsonl", saved[0], *failed)
    history.refresh()
    assert [event.text for event in history.events] == [
        "checkpoint of step 5 saved",
        f"{full} Free at least 1 MB",
    ]
    assert history.attempt(1).failed_saves == {10: full, 15: full}
    assert history.newest_checkpoint() == 15, "a resume may begin from the only copy"
    paused = {"kind": "paused", "step": 15, "message": full}
    room = {"kind": "disk_room", "free_bytes": 2 << 20}
    journals.add("beta", "rank-1.jsonl", paused, saved[2], room)
    history.refresh()
    assert [event.text for event in history.events[2:]] == [
        f"training is done up to step 15 and waits, since beta cannot save: {full} "
        "The run continues by itself once it can",
        "checkpoint of step 15 saved",
        "beta can store checkpoints again: 2.0 MiB are free",
    ]
    assert history.attempt(1).failed_saves == {10: full}


def test_rank_history_and_shares(history: RunHistory, journals: Journals) -> None:
    journals.add(
        "alpha",
        "rank-1.jsonl",
        {"kind": "phase", "phase": "training"},
        {"kind": "started", "step": 0, "total_steps": 4, "shares": [3, 1]},
        step(1),
        {"kind": "checkpoint", "step": 1},
    )
    history.refresh()
    attempt = history.attempt(1)
    assert (attempt.shares, attempt.total_steps, list(attempt.checkpoints)) == (
        (0.75, 0.25),
        4,
        [1],
    )
    rank = attempt.ranks[1]
    assert rank.progress is not None
    assert (rank.progress.phase, rank.step, rank.tokens_per_s, rank.memory_bytes) == (
        "training",
        1,
        60.0,
        1000,
    )


def test_other_files_in_the_folder_are_left_alone(history: RunHistory, journals: Journals) -> None:
    for name in ("rank-x.jsonl", "notes.jsonl", "rank-0.log"):
        journals.add("alpha", name, step(1))
    journals.add("alpha", "rank-0.jsonl", b'{"kind":"step","st')
    assert history.refresh().steps == ()
    assert history.steps() == []


def test_an_evaluation_tells_what_its_loss_means() -> None:
    told = describe_line(
        {"kind": "eval", "step": 8, "loss": 1.5, "perplexity": 4.4817}, "run", 1, "a", 0
    )
    assert told is not None
    assert told.event.text == "evaluation after step 8: loss 1.500, perplexity 4.482"
    line = {"kind": "eval", "step": 8, "loss": 0.6, "reward_accuracy": 0.75}
    told = describe_line(line, "run", 1, "a", 0)
    assert told is not None
    assert told.event.text == "evaluation after step 8: loss 0.600, 75 % of pairs ranked correctly"


def test_figures_of_all_ranks_become_those_of_the_cluster(
    journals: Journals, history: RunHistory
) -> None:
    started = {"kind": "started", "step": 0, "total_steps": 9, "peak_flops_per_s": 1e12}
    split = {"input_s": 0.05, "optimizer_s": 0.05, "eta": 0.9}
    journals.add("a", "rank-0.jsonl", started, step(1, model_flops=1e11, mfu=0.2, **split))
    evaluation = {"kind": "eval", "step": 1, "loss": 1.5, "perplexity": 4.48}
    spare = {"memory_bytes": 6 << 30, "memory_unpacked_bytes": 2 << 30}
    journals.add(
        "b", "rank-1.jsonl", started, step(1, model_flops=3e11, mfu=0.6, **spare), evaluation
    )
    history.refresh()
    places = [RankPlacement(rank=r, local_rank=0, node="ab"[r], device="cuda:0") for r in (0, 1)]
    spec = RunSpec(model="m", data=DataSpec(train="t"))
    run = RunRecord(
        run_id="r", name="r", state="running", spec=spec, attempt=1, nodes=("a", "b"), created_s=1.0
    )
    shown = make_snapshot(run, places, history)
    assert (shown.eta, shown.mfu) == (0.9, pytest.approx(0.4))
    assert (shown.evaluation_loss, shown.perplexity) == (1.5, 4.48)
    first, second = shown.ranks
    assert [round(part.share, 2) for part in split_step(first)] == [0.1, 0.6, 0.2, 0.1]
    assert describe_split(first) == "input 10 %, compute 60 %, waiting 20 %, optimizer 10 %"
    assert split_step(second) == ()
    assert describe_split(second) == DASH
    assert (first.mfu, first.memory_reserved_bytes) == (0.2, None)
    assert [show_rank_memory(rank) for rank in (first, second)] == ["1.0 KiB", "6.0 + 2.0 GiB"]
    little = replace(second, memory_unpacked_bytes=200 << 20)
    assert show_rank_memory(little) == "6.0 GiB + 200 MiB"
    alone = make_snapshot(run, [*places, replace(places[0], rank=2)], history)
    assert alone.mfu is None


def test_the_phase_of_the_slowest_rank_shows_how_far_it_is(
    history: RunHistory, journals: Journals
) -> None:
    spec = RunSpec(model="m", data=DataSpec(train="t"))
    run = RunRecord(run_id="r", name="r", state="running", spec=spec, attempt=1, nodes=("a", "b"),
                    created_s=0.0)  # fmt: skip
    places = [
        RankPlacement(rank=rank, local_rank=0, node=node, device="cpu")
        for rank, node in enumerate("ab")
    ]
    journals.add("a", "rank-0.jsonl", {"kind": "phase", "phase": "preparing"})
    journals.add("b", "rank-1.jsonl", {"kind": "phase", "phase": "tokenizing", "share": 0.123})
    history.refresh()
    found = make_snapshot(run, places, history)
    assert found.phase == "reading the data, 12 %"
    assert [rank.phase for rank in found.ranks] == ["preparing", "reading the data, 12 %"]
    assert found.starting is not None
    assert describe_start(found.starting) == "Reading the data on b: 12 %"
    weights = {
        "phase": "weights", "done": 6 << 30, "total": 12 << 30, "expected_s": 11.7, "time_s": 50.0,
    }  # fmt: skip
    journals.add("b", "rank-1.jsonl", {"kind": "phase", **weights})
    history.refresh()
    found = make_snapshot(run, places, history)
    assert found.phase == "loading weights, 50 %"
    assert found.starting is not None
    said = "Loading weights on b: 6.0 of 12.0 GiB"
    # Counted down between two records; a record that does not come is no promise kept.
    for now_s, left in ((None, "about 12 s left"), (54.0, "about 8 s left"),
                        (61.5, "almost done"), (90.0, "nothing new for 40 s")):  # fmt: skip
        assert describe_start(found.starting, now_s) == f"{said}, {left}"
    # A total of nothing, or more than all of it, is no share that could be shown.
    for broken in ({"done": 5, "total": 0}, {"done": -1, "total": 3}, {"total": 1e300}):
        journals.add("b", "rank-1.jsonl", {"kind": "phase", "phase": "weights", **broken})
        history.refresh()
        assert make_snapshot(run, places, history).phase == "loading weights"
    for node, rank in (("a", 0), ("b", 1)):
        journals.add(node, f"rank-{rank}.jsonl", {"kind": "phase", "phase": "training"})
    history.refresh()
    found = make_snapshot(run, places, history)
    assert found.phase == "training"
    assert found.starting is not None
    assert describe_start(found.starting).startswith("Training the first step")
    journals.add("a", "rank-0.jsonl", step(1))
    history.refresh()
    found = make_snapshot(run, places, history)
    assert (found.phase, found.starting) == ("training", None)
    # Later steps may correct the setting: that is no start.
    journals.add("b", "rank-1.jsonl", {"kind": "phase", "phase": "adapting"})
    history.refresh()
    assert make_snapshot(run, places, history).starting is None


def test_ranks_that_were_lost_count_no_more_once_the_others_have_regrouped(
    journals: Journals,
) -> None:
    places = [
        RankPlacement(rank=rank, local_rank=0, node=node, device="cpu")
        for rank, node in enumerate("abc")
    ]
    speeds = {"model_flops": 10.0, "step_s": 1.0}
    for rank, node in enumerate("abc"):
        started = {"kind": "started", "step": 0, "peak_flops_per_s": 100.0, "shares": [1, 1, 1]}
        saving = {"kind": "phase", "phase": "training" if node == "a" else "saving"}
        journals.add(node, f"rank-{rank}.jsonl", started, step(1, **speeds), saving)
    history = RunHistory("r", journals.folder)
    history.refresh()
    run = RunRecord(
        run_id="r",
        name="r",
        state="running",
        spec=RunSpec(model="m", data=DataSpec(train="t")),
        attempt=1,
        nodes=("a", "b", "c"),
        created_s=1.0,
    )
    assert make_snapshot(run, places, history).phase == "training"
    line = {"kind": "regrouped", "time_s": 103.0, "step": 1, "generation": 1, "seconds": 1.5}
    whole = {"nodes": ["b", "c"], "lost_nodes": ["a"], "lost_ranks": [0, "x"]}
    odd = {"nodes": ["../b"], "lost_nodes": None, "lost_ranks": 7}
    journals.add("b", "rank-1.jsonl", {**line, **odd}, {**line, **whole})
    journals.add("c", "rank-2.jsonl", {**line, **whole, "seconds": 1.0})
    assert not history.refresh().events, "what it cost is not known yet"
    last_s = history.attempt(1).steps[1].time_s
    journals.add("b", "rank-1.jsonl", {**step(2, **speeds), "time_s": last_s + 2.0})
    assert [event.text for event in history.refresh().events] == [
        "a was lost; b and c continued in their processes, back after 2.0 s, and no completed step "
        "is repeated"
    ]
    assert history.attempt(1).members == ("b", "c")
    end = {"kind": "rank_exited", "rank": 1, "exit_code": -9, "time_s": 104.0}
    journals.add("b", "supervisor.jsonl", end)
    later = {"generation": 2, "time_s": 106.0, "nodes": ["c"], "lost_nodes": ["d", "b", "e"]}
    journals.add("c", "rank-2.jsonl", {**line, **later, "step": 4})
    journals.add("c", "rank-2.jsonl", {**step(5, **speeds), "time_s": 107.0})
    told = history.refresh().events[-1].text
    lost = "rank 1 on node b was ended by signal 9 and d and e were lost"
    assert told.startswith(f"{lost}; c continued")
    found = make_snapshot(run, places, history)
    assert [rank.state for rank in found.ranks] == ["lost", "saving", "saving"]
    assert (found.phase, found.mfu) == ("saving", pytest.approx(0.1))


def test_a_loss_before_the_first_step_is_dated_by_the_node_that_fell_silent_first(
    journals: Journals,
) -> None:
    """The others notice it later, after their patience for a node that does not answer."""
    history = RunHistory("r", journals.folder)
    loading = {"kind": "phase", "phase": "loading"}
    journals.add("a", "rank-0.jsonl", {**loading, "time_s": 100.0})
    journals.add("b", "rank-1.jsonl", {**loading, "time_s": 101.0})
    ended = {"kind": "rank_exited", "rank": 0, "exit_code": -6, "time_s": 239.4}
    journals.add("a", "supervisor.jsonl", ended)
    history.refresh()
    assert history.attempt(1).find_loss_s() == 101.0
    killed = {"kind": "rank_exited", "rank": 1, "exit_code": -9, "time_s": 130.0}
    journals.add("b", "supervisor.jsonl", killed, {**loading, "time_s": 131.0})
    history.refresh()
    assert history.attempt(1).find_loss_s() == 130.0
    assert history.attempt(2).find_loss_s() is None


def test_a_rank_that_stood_still_dates_the_loss_unless_it_continued(journals: Journals) -> None:
    history = RunHistory("r", journals.folder)
    journals.add("a", "rank-0.jsonl", {"kind": "phase", "phase": "loading", "time_s": 100.0})
    standing = {"kind": "standing", "rank": 0, "message": "still", "time_s": 110.0}
    moving = {"kind": "moving", "time_s": 112.0}
    journals.add("a", "supervisor.jsonl", standing, moving, {**standing, "time_s": 150.0})
    journals.add(
        "a", "supervisor.jsonl",
        {"kind": "rank_exited", "rank": 0, "exit_code": -9, "time_s": 160.0},
    )  # fmt: skip
    history.refresh()
    assert history.attempt(1).find_loss_s() == 150.0
