"""What the export dialog asks follows from the format."""

import pytest

from agents.artifacts import METHODS, TYPES, USUAL_TYPES, MakeJob, Origin, TextSource
from app.flows.export import FORMATS, Answers, review


def test_every_method_is_offered_with_all_of_its_types():
    assert {one.key for one in FORMATS} == {"merged", *METHODS}
    for one in FORMATS:
        found = review(Answers(to=one.key, folder="x"))
        assert tuple(kind for kind, _ in found.types) == TYPES.get(one.key, ())
        assert found.usual == USUAL_TYPES.get(one.key, ())
        ready = Answers(to=one.key, types=found.usual, folder="x")
        assert review(ready).is_ready


@pytest.mark.parametrize("method", METHODS)
def test_what_is_chosen_by_itself_is_a_job(method):
    job = MakeJob(
        python="p", model="m", method=method, destination="d", train=TextSource(path="t"),
        origin=Origin(base="b", data="d", run_id="r", run_name="n", step=1),
        types=USUAL_TYPES.get(method, ()),
    )  # fmt: skip
    assert job.method == method


@pytest.mark.parametrize(
    ("answers", "field"),
    [
        (Answers(to="gguf", folder="x"), "types"),
        (Answers(to="gptq", types=("4-bit", "8-bit"), folder="x"), "types"),
        (Answers(to="awq", folder="  "), "folder"),
    ],
)
def test_what_is_missing_is_named(answers, field):
    found = review(answers)
    assert list(found.problems) == [field]
    assert not found.is_ready
