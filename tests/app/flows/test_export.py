"""What the export wizard asks, the jobs that follow, and what it says of places."""

from dataclasses import replace
from typing import get_args

import pytest

from agents.contract.formats import ENGINES, EXPORTS, METHODS, Method
from agents.contract.requests.exports import MakeJob, Origin, TextSource
from app.flows.export import (
    MAKERS,
    NO_CHECKPOINT,
    PHASES,
    STEPS,
    ExportAnswers,
    asks_calibration,
    describe_commands,
    describe_target,
    find_problems,
    join_places,
    list_jobs,
    next_step,
    offer_targets,
    place_phase,
    suggest_folder,
)
from tests.fakes.exports import make_export_plan

ALL = tuple(target for to in EXPORTS for target, _ in offer_targets(to))


def test_every_method_of_a_job_is_offered():
    assert set(METHODS) == set(get_args(Method))


def test_types_of_gguf_are_one_job_and_others_one_each():
    jobs = list_jobs("r", ExportAnswers(targets=ALL, folder="/m/out/"))
    assert [(job.request.to, len(job.request.types), job.folder) for job in jobs] == [
        ("merged", 0, "/m/out/merged"),
        ("gguf", 6, "/m/out/gguf"),
        ("awq", 0, "/m/out/awq"),
        ("gptq", 1, "/m/out/gptq-4-bit"),
        ("gptq", 1, "/m/out/gptq-8-bit"),
        ("nf4", 0, "/m/out/nf4"),
    ]
    (alone,) = list_jobs("r", ExportAnswers(targets=("gptq:8-bit",), folder="/m/out"))
    assert alone.folder == "/m/out"
    assert list_jobs("r", ExportAnswers(folder="/m")) == ()


@pytest.mark.parametrize("job", list_jobs("r", ExportAnswers(targets=ALL, folder="x"))[1:])
def test_what_is_chosen_is_a_job_of_the_agent(job):
    asked = job.request
    made = MakeJob(
        python="p", model="m", method=asked.to, destination="d", train=TextSource(path="t"),
        origin=Origin(base="b", data="d", run_id="r", run_name="n", step=1), types=asked.types,
    )  # fmt: skip
    assert made.method == asked.to


def test_steps_lead_there_and_back_and_calibration_only_where_it_counts():
    plain, fitted = ExportAnswers(targets=("nf4",)), ExportAnswers(targets=("awq", "nf4"))
    assert not asks_calibration(plain)
    for answers, count in ((plain, 4), (fitted, 5)):
        seen = ["what"]
        for _ in STEPS:
            seen.append(next_step(seen[-1], answers, 1))
        assert len(dict.fromkeys(seen)) == count
        assert next_step("where", answers, -1) == ("formats" if count == 4 else "calibration")
    assert next_step("what", plain, -1) == "what"
    assert next_step("calibration", plain, 1) == "where", "its format was taken away"


def test_what_is_missing_keeps_one_at_the_step():
    good = ExportAnswers(targets=("awq",), folder="/m")
    assert [find_problems(step, good) for step, _ in STEPS] == [""] * 5
    assert "no complete checkpoint" in find_problems("what", good, checkpoint_problem=NO_CHECKPOINT)
    assert "at least one" in find_problems("formats", replace(good, targets=()))
    assert find_problems("calibration", good, calibration_problem="3 words") == "3 words"
    assert find_problems("calibration", replace(good, targets=("nf4",))) == ""
    assert "folder" in find_problems("where", replace(good, folder="  "))
    for step in ("where", "summary"):
        assert find_problems(step, good, place_problem="/m is not empty") == "/m is not empty"


@pytest.mark.parametrize(
    ("typed", "folder"),
    [("/m/out/", "/m/out"), ("out", "~/out"), ("models/out", "~/models/out"), ("~/x", "~/x")],
)
def test_a_folder_without_a_beginning_is_below_the_home_folder(typed, folder):
    (job,) = list_jobs("r", ExportAnswers(targets=("nf4",), folder=typed))
    assert job.folder == folder


def test_the_name_of_a_run_makes_one_folder_that_every_disk_takes():
    assert suggest_folder("/home/me", "../x:y" + "z" * 300) == f"/home/me/..-x-y{'z' * 54}-export"


def test_commands_say_all_that_was_chosen():
    answers = ExportAnswers(
        targets=("awq", "merged"), folder="/m/o", node="pc", calibration="my.txt", checkpoint=40
    )
    assert describe_commands("r", answers) == (
        "rackless export r --to merged --checkpoint 40 --node pc --out /m/o/merged",
        "rackless export r --to awq --checkpoint 40 --node pc --calibration my.txt --out /m/o/awq",
    )


def test_another_maker_of_awq_is_said_and_of_awq_alone():
    answers = ExportAnswers(targets=("awq", "gptq:4-bit"), folder="/m", engine="autoawq")
    awq, gptq = list_jobs("r", answers)
    assert (awq.request.engine, gptq.request.engine) == ("autoawq", "gptqmodel")
    assert (awq.label, gptq.label) == ("AWQ by AutoAWQ", "GPTQ 4-bit")
    assert describe_commands("r", answers) == (
        "rackless export r --to awq --engine autoawq --out /m/awq",
        "rackless export r --to gptq --type 4-bit --out /m/gptq",
    )
    assert {one.key for one in MAKERS} == set(ENGINES)


def test_places_join_what_all_jobs_take():
    plans = [make_export_plan("awq"), make_export_plan("gguf", ("Q8_0",))]
    rows = join_places(plans)
    assert [(row.node, bool(row.problem)) for row in rows] == [
        ("beta", False), ("alpha", False), ("delta", True), ("gamma", True),
    ]  # fmt: skip
    assert rows[0].words.startswith("about 7 min 40 s, 9.0 GiB of memory, 6.0 GiB of GPU memory")
    assert rows[1].words.endswith("; run poems-2 uses its GPU, so its CPU does the work")
    assert rows[2].problem == "It has no complete copy of the checkpoint."


def test_a_target_says_what_it_takes():
    words = describe_target("awq", make_export_plan("awq"))
    assert words == "3.7 GiB, about 3 min 50 s on beta, 6.0 GiB of GPU memory"
    both = make_export_plan("gguf", ("Q8_0", "Q4_K_M"))
    assert describe_target("gguf:Q4_K_M", both) == "3.8 GiB"
    nowhere = replace(both, places=both.places[2:])
    assert describe_target("gguf:Q8_0", nowhere) == "6.7 GiB, no node can run it now"
    assert describe_target("awq", replace(both, made=None)) == ""


def test_phases_of_core_and_node_lead_through_the_bar():
    reported = (
        "find", "merge", "check", "load", "merge", "write", "prepare", "", "texts", "original",
        "control", "quantize", "proof", "quantize", "fetch",
    )  # fmt: skip
    seen = [0]
    for phase in reported:
        seen.append(place_phase(phase, seen[-1]))
    assert [PHASES[place] for place in dict.fromkeys(seen)] == list(PHASES)
