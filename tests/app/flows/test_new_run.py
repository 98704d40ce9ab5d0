"""The New run dialog's logic, as data: what each answer gives."""

import dataclasses
import json
from dataclasses import fields, replace

import pytest

from agents.contract.data import SourceSpec
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec, run_keys
from app.events import NodeSnapshot
from app.flows.new_run import (
    list_questions,
    name_paths,
    plan_spec,
    preview_spec,
    review,
    take_advice,
)
from app.flows.new_run_answers import (
    proposed_answers,
    take_up,
    to_answers,
    to_draft,
    to_spec,
    use_recipe,
    usual_answers,
)
from app.library.recipes import list_recipes
from app.runfile.run_file import format_run, parse_run
from app.text import free_name
from tests.fakes.core import make_node

USUAL = usual_answers()
GOOD = USUAL | {"model": "m", "data.train": "t.jsonl"}


def node(name, state="online"):
    return NodeSnapshot(name=name, transport="ssh", address=name, state=state)


NODES = (node("alpha"), node("beta"))


def test_every_key_of_a_run_file_is_asked_once():
    asked = [key.name for folded in (False, True) for key in list_questions(advanced=folded)]
    assert sorted(asked) == sorted(run_keys())


def test_questions_stand_with_what_they_belong_to():
    asked = [key.name for key in list_questions(advanced=True)]
    assert asked[:2] == ["data.eval", "evaluate_every_steps"]
    groups = [key.about.group for key in list_questions(advanced=True)]
    assert len(set(groups)) == sum(a != b for a, b in zip(["", *groups], groups, strict=False))


def test_good_answers_make_the_spec_of_a_run_file_with_the_defaults():
    result = review(GOOD, NODES)
    assert result.findings == {}
    assert result.spec == RunSpec(model="m", data=DataSpec(train="t.jsonl"))


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("name", " ", "name"),
        ("model", "", "folder"),
        ("data.train", "", "file"),
        ("adapter.rank", "0", "minimum is 1"),
        ("adapter.rank", "1.5", "'1.5' is not a whole number"),
        ("adapter.rank", "", "Enter a number"),
        ("adapter.alpha", "0", "above 0"),
        ("adapter.dropout", "1", "below 1"),
        ("adapter.dropout", "-0.1", "minimum is 0"),
        ("adapter.targets", " , ", "all-linear"),
        ("sequence_tokens", "7", "minimum is 8"),
        ("batch_sequences", "x", "'x' is not a whole number"),
        ("epochs", "0", "above 0"),
        ("epochs", "nan", "finite number"),
        ("max_steps", "0", "minimum is 1"),
        ("learning_rate", "2e", "'2e' is not a number"),
        ("learning_rate", "inf", "finite number"),
        ("checkpoint.every_minutes", "0", "above 0"),
        ("checkpoint.every_steps", "0", "minimum is 1"),
        ("checkpoint.keep", "0", "minimum is 1"),
        ("checkpoint.copies", "-2", "minimum is 1"),
        ("adapter.dropout", "", "Enter a number"),
        ("warmup_share", "1", "below 1"),
        ("weight_decay", "-1", "minimum is 0"),
        ("max_gradient_norm", "0", "above 0"),
        ("seed", "-1", "minimum is 0"),
        ("seed", str(2**63), "maximum is 9,223,372,036,854,775,807"),
        ("seed", "-" + "9" * 400, "-9999999999999999999... is too small"),
        ("adapter.rank", "-" + "9" * 400, "too small"),
        ("batch_sequences", "9" * 400, "maximum is 1,000,000."),
        ("batch_sequences", "9" * 5000, "'99999999999999999999...' is not a whole number"),
        ("batch_sequences", "1,5", "'1,5' is not a whole number"),
        ("max_steps", "0,5", "'0,5' is not a whole number"),
        ("sequence_tokens", "20_48", "'20_48' is not a whole number"),
        ("epochs", "1e300", "maximum is"),
        ("memory_gib", "1e300", "maximum is"),
        ("adapter.targets", "layers[.](0|1", "is not a regular expression: missing )"),
        ("memory_gib", "0", "above 0"),
        ("evaluate_every_steps", "0", "minimum is 1"),
        ("shares", "1, x", "'x' is not a number"),
        ("shares", "1, 0", "above 0"),
        ("parallel", "sharded", "not available"),
        ("nodes", "", "at least one"),
        ("nodes", "alpha, gamma", "gamma"),
    ],
)
def test_a_bad_answer_is_named_at_its_field_and_nothing_starts(key, text, words):
    result = review({**GOOD, key: text}, NODES)
    assert result.spec is None
    assert result.findings[key].severity == "error"
    assert words in result.findings[key].text


def test_weights_that_are_trained_are_not_streamed():
    result = review(GOOD | {"adapter.kind": "full", "parallel": "streamed"}, NODES)
    assert "keeps frozen weights outside the GPU" in result.findings["parallel"].text


def test_fields_of_an_adapter_do_not_matter_in_full_training():
    assert review(GOOD | {"adapter.kind": "full", "adapter.rank": "0"}, NODES).findings == {}


@pytest.mark.parametrize(
    ("nodes", "answer", "words"),
    [
        ((), "all", "No nodes yet"),
        ((node("alpha", "unreachable"),), "all", "No node is online"),
        ((node("alpha"), node("beta", "refused")), "all", "beta"),
        ((node("alpha"), node("beta", "refused")), "beta", "beta"),
    ],
)
def test_nodes_that_cannot_start_are_named(nodes, answer, words):
    result = review(GOOD | {"nodes": answer}, nodes)
    assert words in result.findings["nodes"].text
    assert result.spec is None


def test_a_run_on_all_nodes_starts_without_a_pc_that_is_off():
    nodes = (node("alpha"), node("beta", "unreachable"))
    result = review(GOOD | {"nodes": "all"}, nodes)
    assert result.findings["nodes"].severity == "warning"
    assert "the run starts without it" in result.findings["nodes"].text
    assert result.spec is not None
    assert review(GOOD | {"nodes": "alpha, beta"}, nodes).spec is None


def test_a_lost_node_that_is_not_chosen_does_not_matter():
    nodes = (node("alpha"), node("beta", "refused"))
    assert review(GOOD | {"nodes": "alpha"}, nodes).spec.nodes == ("alpha",)


def test_warnings_do_not_stop_a_start():
    result = review(GOOD | {"learning_rate": "0.5", "checkpoint.every_minutes": ""}, NODES)
    assert {f.severity for f in result.findings.values()} == {"warning"}
    assert result.spec.checkpoint.every_minutes is None


def test_what_is_not_there_is_told_at_its_field_and_a_start_looks_again():
    result = review(GOOD, NODES, {"data.train": "There is no such file.", "model": "No folder."})
    assert result.findings["data.train"].text == "There is no such file."
    assert result.spec is not None
    assert review(GOOD | {"model": ""}, NODES, {"model": "No folder."}).is_error("model")


def test_numbers_as_people_type_them():
    typed = GOOD | {"learning_rate": "0,0002", "batch_sequences": "1,024", "max_steps": "1 000"}
    spec = review(typed, NODES).spec
    assert (spec.learning_rate, spec.batch_sequences, spec.max_steps) == (0.0002, 1024, 1000)


CONTRADICTIONS = [
    ({"objective": "dpo", "packing": "true"}, "packing"),
    ({"objective": "dpo", "data.format": "chat"}, "data.format"),
    ({"data.format": "preference"}, "data.format"),
]


@pytest.mark.parametrize(("given", "key"), CONTRADICTIONS)
def test_answers_that_contradict_each_other_are_told_at_the_field(given, key):
    result = review(GOOD | given, NODES)
    assert set(result.findings) == {key}
    assert result.is_error(key)
    with pytest.raises(ValueError, match=key):
        to_spec(GOOD | given)


def test_what_is_allowed_and_without_effect_is_told_even_before_there_is_a_model():
    nodes = (make_node("alpha"),)
    typed = USUAL | {
        "optimizer": "paged_adamw_8bit",
        "compression": "bf16",
        "memory_gib": "8",
        "evaluate_every_steps": "5",
    }
    findings = review(typed, nodes).findings
    told = {key for key, finding in findings.items() if finding.severity == "warning"}
    assert told == {"optimizer", "compression", "memory_gib", "evaluate_every_steps"}


def test_shares_are_one_for_each_device():
    nodes = (make_node("alpha", ("card", 8), ("card", 8)), make_node("beta"))
    assert (
        "2 shares for 3 devices" in review(GOOD | {"shares": "1, 2"}, nodes).findings["shares"].text
    )
    assert review(GOOD | {"shares": "1, 2.5, 1"}, nodes).spec.shares == (1.0, 2.5, 1.0)
    single = GOOD | {"shares": "1", "parallel": "single"}
    assert review(single, nodes).spec.shares == (1.0,)


def test_what_is_not_asked_is_no_problem():
    typed = GOOD | {
        "adapter.kind": "full",
        "adapter.alpha": "x",
        "adapter.rslora": "true",
        "dpo_beta": "-1",
    }
    result = review(typed, NODES)
    assert result.findings == {}
    adapter = {name for name in run_keys() if name.startswith("adapter.")} - {"adapter.kind"}
    assert not (adapter | {"dpo_beta"}) & result.asked


def test_folded_answers_that_differ_from_the_usual_are_counted():
    typed = GOOD | {"adapter.rank": "8", "seed": "7", "weight_decay": " 0 ", "checkpoint.keep": "5"}
    assert review(typed, NODES).changed == {"seed", "checkpoint.keep"}
    full = typed | {"adapter.kind": "full", "adapter.dropout": "0.5"}
    assert review(full, NODES).changed == {"seed", "checkpoint.keep"}, "nobody is asked for dropout"


# ---------------------------------------------------------------- round trip

OTHER = {
    "name": "n",
    "model": "/models/m",
    "data": DataSpec(
        train="a",
        eval="b",
        format="chat",
        ignore_columns=("id", "label"),
        columns=("text=body",),
        rendered="no",
        encoding="cp1252",
        documents="line",
        long_text="cut",
        learn="everything",
        chat_template="chatml",
        template_options=("enable_thinking=false",),
        new_tokens=("<a>", "<b>"),
        sources=(
            SourceSpec(path="a", weight=0.5),
            SourceSpec(path="c", format="auto", columns=("text=t",), max_rows=5, split="test"),
        ),
        shuffle=False,
        deduplicate="exact",
        reasoning="drop",
    ),
    "objective": "dpo",
    "dpo_beta": 0.01,
    "adapter": AdapterSpec(
        kind="qlora",
        rank=4,
        alpha=7.5,
        dropout=0.0,
        targets=("q", "v"),
        rslora=True,
        dora=True,
        also_train=("embed_tokens", "lm_head"),
    ),
    "sequence_tokens": 64,
    "packing": True,
    "batch_sequences": 3,
    "epochs": 1.23456789,
    "max_steps": 12,
    "learning_rate": 3.3333333333e-5,
    "schedule": "linear",
    "warmup_share": 0.1,
    "weight_decay": 0.01,
    "max_gradient_norm": 0.3,
    "optimizer": "paged_adamw_8bit",
    "precision": "fp32",
    "recompute": "all",
    "compile": "off",
    "exact": False,
    "memory_gib": 7.5,
    "seed": 2**63 - 1,
    "nodes": ("alpha", "zeta"),
    "parallel": "sharded",
    "shares": (1.0, 0.1 + 0.2),
    "rebalance": False,
    "compression": "powersgd",
    "activation_bits": 8,
    "evaluate_every_steps": 5,
    "checkpoint": CheckpointSpec(every_minutes=None, every_steps=5, keep=1, copies=1),
    "recovery": "off",
    "rejoin": "off",
    "divergence": "retry",
}
"""Of every key a value that is not the default."""


def test_the_dialog_asks_for_every_key_of_a_run_file():
    assert set(OTHER) == {field.name for field in fields(RunSpec)}
    usual = RunSpec(model="m", data=DataSpec(train="t"))
    for key, value in OTHER.items():
        assert getattr(usual, key) != value
        if dataclasses.is_dataclass(value):
            part = getattr(usual, key)
            same = [
                f.name for f in fields(value) if getattr(part, f.name) == getattr(value, f.name)
            ]
            # Experts exclude DoRA, and have a case of their own below.
            assert same == (["experts"] if key == "adapter" else [])


@pytest.mark.parametrize("key", OTHER)
def test_each_setting_survives_the_dialog(key):
    given = {"model": "m", "data": DataSpec(train="t"), key: OTHER[key]}
    spec = RunSpec(**given)
    assert to_spec(to_answers(spec)) == spec


@pytest.mark.parametrize(
    "changed",
    [
        {"objective": "sft"},
        {"objective": "sft", "precision": "fp64", "adapter": AdapterSpec()},
        {"packing": False, "data": DataSpec(train="a", format="preference")},
        {"objective": "sft", "adapter": AdapterSpec(dropout=0.0, experts=True)},
    ],
)
def test_a_run_file_written_by_hand_survives_the_dialog(changed):
    text = format_run(RunSpec(**{**OTHER, **changed}))
    answers = to_answers(parse_run(text))
    assert format_run(to_spec(answers)) == text
    assert to_answers(to_spec(answers)) == answers


def test_full_training_keeps_what_a_run_file_says_about_adapters():
    spec = RunSpec(model="m", data=DataSpec(train="t"), adapter=AdapterSpec(kind="full", rank=8))
    assert to_spec(to_answers(spec)) == spec


@pytest.mark.parametrize("targets", ["all-linear", ("q_proj",), r".*\.(q|v)_proj", "a{1,2}.*"])
def test_targets_are_a_word_a_list_or_a_pattern(targets):
    adapter = AdapterSpec(targets=targets)
    spec = RunSpec(model="m", data=DataSpec(train="t"), adapter=adapter)
    assert to_spec(to_answers(spec)).adapter.targets == targets


def test_numbers_are_shown_as_people_write_them():
    answers = to_answers(RunSpec(model="m", data=DataSpec(train="t"), learning_rate=5e-6))
    shown = [answers[key] for key in ("learning_rate", "adapter.alpha", "warmup_share")]
    assert shown == ["5e-6", "32", "0.03"]


def test_the_first_answers_are_those_of_a_run_file_without_any_key():
    assert to_answers(RunSpec(model="m", data=DataSpec(train="t.jsonl"))) == GOOD


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_gives_its_settings_and_leaves_model_data_and_nodes(recipe):
    typed = GOOD | {"name": "mine", "nodes": "alpha"}
    result = review(use_recipe(typed, recipe.spec), NODES)
    assert result.findings == {}
    assert result.spec == replace(
        recipe.spec,
        name="mine",
        model="m",
        data=replace(recipe.spec.data, train="t.jsonl"),
        nodes=("alpha",),
    )


@pytest.mark.parametrize(
    ("wanted", "taken", "free"),
    [
        ("run-1", (), "run-1"),
        ("a", ("a",), "a-2"),
        ("a-9", ("a-9", "a-10"), "a-11"),
        ("-1", ("-1",), "-1-2"),
    ],
)
def test_a_name_that_is_taken_gets_the_next_number(wanted, taken, free):
    assert free_name(wanted, taken) == free


def test_data_can_be_looked_at_while_other_answers_are_open():
    spec = preview_spec(GOOD | {"adapter.rank": "x", "sequence_tokens": "64", "nodes": "alpha"})
    assert (spec.model, spec.sequence_tokens, spec.nodes) == ("m", 64, ("alpha",))
    assert preview_spec(GOOD | {"data.train": ""}) is None
    assert preview_spec(GOOD | {"sequence_tokens": ""}) is None


def test_the_summary_says_what_follows():
    summary = dict(review(GOOD | {"max_steps": "50"}, NODES).summary)
    assert summary["Nodes"] == "alpha and beta"
    assert summary["Tokens per step"] == "up to 49,152"
    assert summary["Ends after"] == "50 steps at most"


@pytest.mark.parametrize(
    ("answers", "nodes", "words"),
    [
        (USUAL | {"data.train": "t"}, NODES, "Choose a model to see its plan."),
        (GOOD, (), "Add a node to see the plan."),
        (GOOD | {"adapter.rank": "0"}, NODES, "Correct the marked fields to see the plan."),
        (GOOD | {"nodes": "gone"}, NODES, "Choose at least one node to see the plan."),
    ],
)
def test_a_plan_needs_a_model_nodes_and_right_answers(answers, nodes, words):
    assert plan_spec(answers, nodes) == (None, words)


def test_a_plan_needs_neither_name_nor_data():
    spec, words = plan_spec(USUAL | {"model": "m", "name": ""}, NODES)
    assert spec is not None
    assert (spec.model, spec.data.train, words) == ("m", "the data", "")


def test_advice_changes_its_answers_and_nothing_else():
    found = take_advice(
        GOOD | {"name": ""}, {"nodes": ("alpha", "beta"), "optimizer": "adamw_8bit"}
    )
    assert found == GOOD | {"name": "", "nodes": "alpha, beta", "optimizer": "adamw_8bit"}


def test_nodes_that_are_not_known_yet_are_not_called_missing():
    result = review(GOOD, (), are_known=False)
    assert result.findings["nodes"].text == "Looking for your nodes\u2026"
    assert (result.findings["nodes"].severity, result.spec) == ("waiting", None)
    assert dict(result.summary)["Nodes"] == "not known yet"
    assert plan_spec(GOOD, (), are_known=False) == (None, "Looking for your nodes\u2026")
    connecting = (node("alpha"), node("beta", "connecting"))
    result = review(GOOD, connecting)
    assert result.findings["nodes"].text == "Connecting to beta\u2026"
    assert result.spec is None
    assert review(GOOD | {"nodes": "alpha"}, connecting).spec is not None


# ---------------------------------------------------------------- drafts

EARLIER_NAMES = (
    *("name", "model", "train", "objective", "adapter", "rank", "alpha", "dpo_beta"),
    *("sequence_tokens", "batch_sequences", "epochs", "learning_rate", "packing", "nodes", "eval"),
    *("evaluate_every_steps", "format", "ignore_columns", "targets", "dropout", "rslora", "dora"),
    *("experts", "optimizer", "schedule", "warmup_share", "max_gradient_norm", "weight_decay"),
    *("max_steps", "seed", "precision", "recompute", "compile", "memory_gib", "exact", "parallel"),
    *("rebalance", "shares", "compression", "activation_bits", "every_minutes", "every_steps"),
    *("keep", "copies", "recovery", "rejoin", "divergence"),
)
"""Names under which version 0.1 stored the answers of a draft."""


def test_a_draft_of_an_earlier_version_is_taken_up():
    found = take_up({name: f"typed {name}" for name in EARLIER_NAMES}, USUAL)
    assert found["adapter.kind"] == "typed adapter"
    typed = [value for value in found.values() if value.startswith("typed ")]
    assert sorted(typed) == sorted(f"typed {name}" for name in EARLIER_NAMES)


def test_a_draft_holds_what_was_typed_and_comes_back():
    typed = GOOD | {"adapter.rank": "x"}
    draft = to_draft(typed, USUAL)
    assert draft == {"model": "m", "data.train": "t.jsonl", "adapter.rank": "x"}
    assert take_up(draft | {"gone": "1", "seed": 3}, USUAL) == typed


MORE = '[{"path": "-"}, {"path": "more.csv", "weight": "0,5"}]'


def test_further_data_joins_the_first_in_the_spec():
    spec = review({**GOOD, "data.sources": MORE}, NODES).spec
    assert spec.data.list_sources() == (
        SourceSpec(path="t.jsonl"),
        SourceSpec(path="more.csv", weight=0.5),
    )
    alone = review({**GOOD, "data.sources": '[{"path": "-"}]'}, NODES)
    assert alone.spec == review(GOOD, NODES).spec


@pytest.mark.parametrize(
    ("weight", "path", "words"),
    [
        ("x", "b", "Source 2: 'x' is not a number."),
        ("0", "b", "Source 2: weight is 0; it must be above 0 and at most 100."),
        ("1", "", "Source 2: path is empty; it must name a file or a hub dataset."),
        ("1", "t.jsonl", "More training data names t.jsonl twice; name it once, and let its"),
    ],
)
def test_a_wrong_source_is_marked_at_its_list(weight, path, words):
    text = json.dumps([{"path": "-"}, {"path": path, "weight": weight}])
    result = review({**GOOD, "data.sources": text}, NODES)
    assert result.findings["data.sources"].text.startswith(words)
    assert result.spec is None


def test_a_new_form_proposes_a_held_out_part_and_says_so():
    answers = {**GOOD, "data.eval": proposed_answers()["data.eval"]}
    result = review(answers, NODES)
    assert result.spec.data.held_out.is_auto
    assert ("Evaluation", "on 2 % of the rows, at most 200") in result.summary
    assert not result.changed
    assert "data.eval" not in name_paths(answers)
    wrong = review({**GOOD, "data.eval": "1.5"}, NODES)
    assert wrong.findings["data.eval"].text.startswith("Evaluation data is 1.5; it must be a sh")


def test_each_further_file_is_looked_for():
    assert name_paths({**GOOD, "data.sources": MORE})["data.sources[1]"] == "more.csv"
    missing = {"data.sources[1]": "There is no such file."}
    assert review(GOOD, NODES, missing).findings["data.sources"].text == "There is no such file."


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda recipe: recipe.name)
def test_recipes_hold_rows_out(recipe):
    assert recipe.spec.data.held_out.is_auto
