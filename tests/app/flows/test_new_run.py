"""The New run dialog's logic, as data: what each answer gives."""

from dataclasses import asdict, fields, replace

import pytest

from agents.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from app.events import NodeSnapshot
from app.flows.new_run import Answers, apply_answers, review, to_answers, to_spec
from app.flows.new_run_fields import FIELDS

GOOD = Answers(model="m", train="t.jsonl")


def node(name, state="online"):
    return NodeSnapshot(name=name, transport="ssh", address=name, state=state)


NODES = (node("alpha"), node("beta"))


def test_every_answer_has_a_field_with_an_explanation():
    assert [field.key for field in FIELDS] == [field.name for field in fields(Answers)]
    assert all(len(field.help) > 20 for field in FIELDS)
    assert all(field.choices for field in FIELDS if field.kind == "choice")


def test_good_answers_make_the_spec_of_a_run_file_with_the_defaults():
    result = review(GOOD, NODES)
    assert result.findings == {}
    assert result.spec == RunSpec(name="my-run", model="m", data=DataSpec(train="t.jsonl"))


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("name", " ", "name"),
        ("model", "", "folder"),
        ("train", "", "file"),
        ("rank", "0", "least is 1"),
        ("rank", "1.5", "'1.5' is not a whole number"),
        ("rank", "", "needed"),
        ("alpha", "0", "above 0"),
        ("dropout", "1", "below 1"),
        ("dropout", "-0.1", "least is 0"),
        ("targets", " , ", "all-linear"),
        ("sequence_tokens", "7", "least is 8"),
        ("batch_sequences", "x", "'x' is not a whole number"),
        ("epochs", "0", "above 0"),
        ("epochs", "nan", "can be used"),
        ("max_steps", "0", "least is 1"),
        ("learning_rate", "2e", "'2e' is not a number"),
        ("learning_rate", "inf", "can be used"),
        ("every_minutes", "0", "above 0"),
        ("every_steps", "0", "least is 1"),
        ("keep", "0", "least is 1"),
        ("copies", "-2", "least is 1"),
        ("nodes", "", "at least one"),
        ("nodes", "alpha, gamma", "gamma"),
    ],
)
def test_a_bad_answer_is_named_at_its_field_and_nothing_starts(key, text, words):
    result = review(replace(GOOD, **{key: text}), NODES)
    assert result.spec is None
    assert result.findings[key].severity == "error"
    assert words in result.findings[key].text


def test_fields_of_an_adapter_do_not_matter_in_full_training():
    assert review(replace(GOOD, adapter="full", rank="0"), NODES).findings == {}


@pytest.mark.parametrize(
    ("nodes", "answer", "words"),
    [
        ((), "all", "no node yet"),
        ((node("alpha", "unreachable"),), "all", "No node is online"),
        ((node("alpha"), node("beta", "refused")), "all", "beta"),
        ((node("alpha"), node("beta", "refused")), "beta", "beta"),
    ],
)
def test_nodes_that_cannot_start_are_named(nodes, answer, words):
    result = review(replace(GOOD, nodes=answer), nodes)
    assert words in result.findings["nodes"].text
    assert result.spec is None


def test_a_lost_node_that_is_not_chosen_does_not_matter():
    nodes = (node("alpha"), node("beta", "refused"))
    assert review(replace(GOOD, nodes="alpha"), nodes).spec.nodes == ("alpha",)


def test_warnings_do_not_stop_a_start():
    result = review(replace(GOOD, learning_rate="0.5", every_minutes=""), NODES)
    assert {f.severity for f in result.findings.values()} == {"warning"}
    assert result.spec.checkpoint.every_minutes is None


def test_numbers_as_people_type_them():
    typed = replace(GOOD, learning_rate="0,0002", batch_sequences="1,024", max_steps="1 000")
    spec = review(typed, NODES).spec
    assert (spec.learning_rate, spec.batch_sequences, spec.max_steps) == (0.0002, 1024, 1000)


def test_a_run_file_survives_the_dialog():
    spec = RunSpec(
        name="n",
        model="m",
        data=DataSpec(train="a", eval="b", format="chat"),
        adapter=AdapterSpec(kind="qlora", rank=4, alpha=7.5, dropout=0, targets=("q", "v")),
        sequence_tokens=64,
        batch_sequences=3,
        epochs=1.5,
        max_steps=12,
        learning_rate=3e-5,
        nodes=("alpha",),
        seed=7,
        schedule="linear",
        shares=(1.0, 2.0),
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=5, keep=1, copies=1),
    )
    answers = to_answers(spec)
    assert apply_answers(spec, answers) == spec
    assert to_answers(to_spec(answers)) == answers
    assert asdict(answers)["targets"] == "q, v"


def test_the_summary_says_what_follows():
    summary = dict(review(replace(GOOD, max_steps="50"), NODES).summary)
    assert summary["Nodes"] == "alpha and beta"
    assert summary["Tokens per step"] == "up to 49,152"
    assert summary["Ends after"] == "50 steps at the latest"
