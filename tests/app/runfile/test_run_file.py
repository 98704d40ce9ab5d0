"""Run files: what is right reads as meant, what is wrong is told with line, key, limit and word."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.contract.data import SourceSpec
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec, run_keys
from app.errors import UsageError, UserError
from app.runfile.run_file import format_run, parse_run, read_run_file, write_run_file

RIGHT = "model: org/name\ndata: {train: chats.jsonl}\n"
PRODUCT_EXAMPLE = """
name: my-first-run
model: meta-llama/Llama-2-7b-hf        # hub id, or a path on the master or on the nodes
data: {train: chats.jsonl, eval: null, format: auto}
objective: sft
adapter: {kind: qlora, rank: 16, alpha: 32, dropout: 0.05, targets: all-linear}
sequence_tokens: 2048
batch_sequences: 24
epochs: 3
learning_rate: 2.0e-4
optimizer: adamw
seed: 42
nodes: all
parallel: auto
checkpoint: {every_minutes: 10, every_steps: null, keep: 3, copies: 2}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        parse_run(text, "run.yaml")
    assert refused.value.exit_code == 2
    return refused.value.message.splitlines()


def test_two_keys_are_enough() -> None:
    assert parse_run(RIGHT) == RunSpec(model="org/name", data=DataSpec(train="chats.jsonl"))


def test_example_of_the_manual_reads_as_it_says() -> None:
    spec = parse_run(PRODUCT_EXAMPLE)
    assert spec.name == "my-first-run"
    assert spec.adapter == AdapterSpec(kind="qlora")
    assert (spec.epochs, spec.learning_rate, spec.nodes) == (3.0, 2.0e-4, "all")


@pytest.mark.parametrize(
    ("text", "value"), [("2e-4", 2e-4), ("2E4", 2e4), ("1_0e-1", 1.0), ("3", 3.0), (".5", 0.5)]
)
def test_numbers_as_people_write_them(text: str, value: float) -> None:
    assert parse_run(f"{RIGHT}max_gradient_norm: {text}\n").max_gradient_norm == value


@pytest.mark.parametrize("value", ["off", "Off", '"off"', "false"])
def test_off_is_a_word_where_it_is_one_of_the_values(value: str) -> None:
    spec = parse_run(f"{RIGHT}compile: {value}\nrebalance: off\n")
    assert (spec.compile, spec.rebalance) == ("off", False)
    assert parse_run(format_run(spec)) == spec
    assert problems(f"{RIGHT}compile: on\n") == [
        "run.yaml, line 3: compile is true; it must be auto or off"
    ]


def test_text_that_looks_like_a_number_stays_a_text() -> None:
    spec = RunSpec(model="1e5", data=DataSpec(train="0e0"), name="12", nodes=("3e-4", "yes"))
    assert parse_run(format_run(spec)) == spec


def test_lists_become_tuples() -> None:
    spec = parse_run(f"{RIGHT}nodes: [b, a]\nshares: [1, 2.5]\nadapter: {{targets: [q, v]}}\n")
    assert (spec.nodes, spec.shares, spec.adapter.targets) == (("b", "a"), (1.0, 2.5), ("q", "v"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "run.yaml, line 1: the file is empty; it needs the keys model and data"),
        ("# nothing\n", "run.yaml, line 1: the file is empty; it needs the keys model and data"),
        ("- a\n", "run.yaml, line 1: the file must be a list of `key: value` lines"),
        ("hello", "run.yaml, line 1: the file must be a list of `key: value` lines"),
        ("data: {train: t}\n", "run.yaml, line 1: model is missing"),
        ("model: m\ndata: {eval: t}\n", "run.yaml, line 2: data.train is missing under data"),
        ("model: m\ndata: t\n", "run.yaml, line 2: data must be a list of `key: value` lines"),
        ("model: m\ndata:\n", "run.yaml, line 2: data must be a list of `key: value` lines"),
        (
            f"{RIGHT}learnig_rate: 1\n",
            "run.yaml, line 3: learnig_rate is not known; did you mean learning_rate?",
        ),
        (
            f"{RIGHT}adapter:\n  kind: lora\n  rnak: 3\n",
            "run.yaml, line 5: adapter.rnak is not known; did you mean adapter.rank?",
        ),
        (f"{RIGHT}rank: 3\n", "run.yaml, line 3: rank is not known; did you mean adapter.rank?"),
        (f"{RIGHT}keep: 3\n", "run.yaml, line 3: keep is not known; did you mean checkpoint.keep?"),
        (
            f"{RIGHT}adapter: {{zzz: 3}}\n",
            "run.yaml, line 3: adapter.zzz is not known; the keys under adapter are kind, rank, "
            "alpha, dropout, targets, rslora, dora, experts, also_train",
        ),
        (
            f"{RIGHT}adapter: {{kind: lroa}}\n",
            'run.yaml, line 3: adapter.kind is "lroa"; it must be one of lora, qlora, full; '
            "did you mean lora?",
        ),
        (
            f"{RIGHT}objective: ppo\n",
            'run.yaml, line 3: objective is "ppo"; it must be one of sft, dpo; did you mean dpo?',
        ),
        (
            f"{RIGHT}nodes: some\n",
            'run.yaml, line 3: nodes is "some"; it must be one of all, or a list of texts',
        ),
        (
            f"{RIGHT}nodes: [1]\n",
            "run.yaml, line 3: nodes is [1]; it must be all or a list of texts",
        ),
        (
            f"{RIGHT}nodes: []\n",
            "run.yaml, line 3: nodes is empty; it must be all, or name at least one node",
        ),
        (f"{RIGHT}epochs: yes\n", "run.yaml, line 3: epochs is true; it must be a number"),
        (f"{RIGHT}epochs: '3'\n", 'run.yaml, line 3: epochs is "3"; it must be a number'),
        (f"{RIGHT}epochs: 0\n", "run.yaml, line 3: epochs is 0.0; it must be above 0"),
        (
            f"{RIGHT}learning_rate: .inf\n",
            "run.yaml, line 3: learning_rate is inf; it must be a finite number",
        ),
        (f"{RIGHT}seed: 1.5\n", "run.yaml, line 3: seed is 1.5; it must be a whole number"),
        (f"{RIGHT}seed: -1\n", "run.yaml, line 3: seed is -1; it must be at least 0"),
        (f"{RIGHT}name: 12\n", "run.yaml, line 3: name is 12; it must be a text"),
        (
            f"{RIGHT}max_steps: soon\n",
            'run.yaml, line 3: max_steps is "soon"; it must be a whole number or null',
        ),
        (
            f"{RIGHT}shares: [1, 0]\n",
            "run.yaml, line 3: shares is (1.0, 0.0); every share must be above 0",
        ),
        (f"{RIGHT}shares: [1, x]\n", 'run.yaml, line 3: shares[1] is "x"; it must be a number'),
        (
            f"{RIGHT}checkpoint:\n  every_steps: 5\n  keep: 0\n",
            "run.yaml, line 5: checkpoint.keep is 0; it must be at least 1",
        ),
        (
            f"{RIGHT}batch_sequences: {10**30}\n",
            f"run.yaml, line 3: batch_sequences is {10**30}; it must be at most 1,000,000",
        ),
        (f"{RIGHT}model: other\n", "run.yaml, line 3: model is given twice"),
        (f"{RIGHT}dpo_beta: 0\n", "run.yaml, line 3: dpo_beta is 0.0; it must be above 0"),
        (f"{RIGHT}memory_gib: -1\n", "run.yaml, line 3: memory_gib is -1.0; it must be above 0"),
        (
            f"{RIGHT}evaluate_every_steps: 0\n",
            "run.yaml, line 3: evaluate_every_steps is 0; it must be at least 1",
        ),
        (
            f"{RIGHT}recompute: some\n",
            'run.yaml, line 3: recompute is "some"; it must be one of auto, none, all; '
            "did you mean none?",
        ),
        (
            f"{RIGHT}compression: bf61\n",
            'run.yaml, line 3: compression is "bf61"; it must be one of none, bf16, powersgd; '
            "did you mean bf16?",
        ),
        (
            f"{RIGHT}optimizer: adam_8bit\n",
            'run.yaml, line 3: optimizer is "adam_8bit"; it must be one of adamw, adamw_8bit, '
            "paged_adamw_8bit; did you mean adamw_8bit?",
        ),
        (f"{RIGHT}paking: true\n", "run.yaml, line 3: paking is not known; did you mean packing?"),
        (f"{RIGHT}packing: 1\n", "run.yaml, line 3: packing is 1; it must be true or false"),
        (f"{RIGHT}dora: true\n", "run.yaml, line 3: dora is not known; did you mean adapter.dora?"),
        (
            f"{RIGHT}adapter: {{kind: full, dora: true}}\n",
            "run.yaml, line 3: adapter.dora is true; it must be false with kind full",
        ),
        (
            f"{RIGHT}adapter: {{kind: qlora}}\nprecision: fp64\n",
            "run.yaml, line 4: precision is fp64; with kind qlora it must be auto, fp32, bf16 or "
            "fp16, which 4-bit weights are made of",
        ),
        (
            f"{RIGHT}parallel: pipeline\nadapter: {{kind: full}}\n",
            "run.yaml, line 4: adapter.kind is full; with parallel pipeline it must be lora or "
            "qlora: stages keep all other weights as is",
        ),
        (
            f"{RIGHT}parallel: pipeline\noptimizer: adamw_8bit\n",
            "run.yaml, line 4: optimizer is adamw_8bit; with parallel pipeline it must be adamw: "
            "other cuts of the layers would divide the blocks of an 8-bit state",
        ),
        (
            f"{RIGHT}activation_bits: 4\n",
            "run.yaml, line 3: activation_bits is 4; it must be 8 or 16",
        ),
        (
            f"{RIGHT}objective: dpo\npacking: true\n",
            "run.yaml, line 4: packing is true; it must be false with objective dpo",
        ),
        (
            "model: m\nobjective: dpo\ndata:\n  train: t\n  format: alpaca\n",
            "run.yaml, line 5: data.format is alpaca; with objective dpo it must be auto or "
            "preference",
        ),
        (
            "model: m\ndata:\n  train: t\n  format: preference\n",
            "run.yaml, line 4: data.format is preference; with objective sft it must be auto, "
            "chat, alpaca or text, or set objective: dpo",
        ),
        ("model: m\ndata: {train: a, train: b}\n", "run.yaml, line 2: data.train is given twice"),
    ],
)
def test_each_mistake_is_told(text: str, expected: str) -> None:
    assert problems(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "model: [\n",
        "model: m\n\tdata: x\n",
        "a: b: c\n",
        "model: !!python/object/apply:os.system ['true']\ndata: {train: t}\n",
        "model: &m x\ndata: {train: *m}\n",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
        "model: '\x00'\n",
        "? [a]\n: b\n",
        "2020-99-99: x\n",
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text: str) -> None:
    told = problems(text)
    assert told
    assert all(line.startswith("run.yaml") for line in told)


def test_all_mistakes_are_told_at_once_in_order() -> None:
    told = problems("modle: m\ndata: {trian: t}\nadapter: {kind: lroa, rnak: 1}\nepochs: no\n")
    assert [line.split(":")[0] for line in told] == [
        f"run.yaml, line {number}" for number in (1, 2, 3, 3, 4)
    ]
    assert not any("missing" in line for line in told), "a misspelt key is not missing as well"


def test_paths_are_relative_to_the_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs"
    (folder / "base").mkdir(parents=True)
    (folder / "chats.jsonl").write_text("{}")
    (folder / "run.yaml").write_text("model: base\ndata: {train: chats.jsonl, eval: none.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    spec = read_run_file(Path("runs/run.yaml"))
    assert spec.model == str(folder / "base")
    assert spec.data.train == str(folder / "chats.jsonl")
    assert spec.data.eval == "none.jsonl"


def test_files_that_are_no_run_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "huge").write_bytes(b"#" * (1 << 20) + b"#")
    for name, reason in (
        ("binary", "UTF-8"),
        ("huge", "at most"),
        ("absent", "cannot be read"),
        (".", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=reason):
            read_run_file(tmp_path / name)


def test_written_file_reads_back_and_a_bad_place_is_named(tmp_path: Path) -> None:
    spec = parse_run(PRODUCT_EXAMPLE)
    write_run_file(spec, tmp_path / "copy.yaml")
    assert read_run_file(tmp_path / "copy.yaml") == spec
    assert [file.name for file in tmp_path.iterdir()] == ["copy.yaml"]
    with pytest.raises(UserError, match="cannot be written"):
        write_run_file(spec, tmp_path / "absent" / "run.yaml")


SETTINGS = {
    "name": "n", "model": "other", "data.train": "rows", "data.sources": ["rows", "more"],
    "data.eval": "held", "data.format": "chat",
    "data.ignore_columns": ["id"], "data.columns": ["text=body"],
    "data.encoding": "cp1252", "data.rendered": "no", "data.shuffle": False,
    "data.deduplicate": "exact",
    "data.documents": "line", "data.long_text": "cut",
    "data.reasoning": "keep",
    "data.learn": "everything", "data.chat_template": "chatml",
    "data.template_options": ["a=1"], "data.new_tokens": [], "adapter.also_train": ["lm_head"],
    "objective": "dpo", "adapter.kind": "qlora", "adapter.rank": 8,
    "adapter.alpha": 8.5, "adapter.dropout": 0.0, "adapter.targets": ["q"], "adapter.rslora": True,
    "adapter.dora": True, "adapter.experts": False, "dpo_beta": 0.2, "sequence_tokens": 64,
    "batch_sequences": 2, "epochs": 1.5, "learning_rate": 3e-5, "packing": False,
    "nodes": ["alpha"], "evaluate_every_steps": 5, "optimizer": "adamw_8bit",
    "schedule": "linear", "warmup_share": 0.1, "max_gradient_norm": 0.5, "weight_decay": 0.1,
    "max_steps": 7, "seed": 1, "precision": "bf16", "recompute": "all", "compile": "off",
    "memory_gib": 7.5, "exact": False, "parallel": "data", "rebalance": False,
    "shares": [1.0, 2.5], "compression": "bf16", "activation_bits": 8,
    "checkpoint.every_minutes": None, "checkpoint.every_steps": 5, "checkpoint.keep": 1,
    "checkpoint.copies": 1, "recovery": "off", "rejoin": "off", "divergence": "retry",
}  # fmt: skip
"""A value for every key of the run file."""


def test_every_key_can_be_set_for_one_command() -> None:
    assert set(SETTINGS) == set(run_keys())
    given = [f"{key}={json.dumps(value)}" for key, value in SETTINGS.items()]
    spec = parse_run("model: m\ndata: {train: t, format: preference}\n", settings=[
        one for one in given if not one.startswith("objective=")
    ])  # fmt: skip
    for key in run_keys().values():
        if key.name == "data.sources":
            assert [source.path for source in spec.data.sources] == SETTINGS["data.sources"]
            continue
        value = SETTINGS[key.name] if key.name != "objective" else "sft"
        assert key.value_in(spec) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("adapter.rank=0", "--set adapter.rank: adapter.rank is 0; it must be at least 1"),
        ("epochs=soon", '--set epochs: epochs is "soon"; it must be a number'),
        ("shares=[1, x]", '--set shares: shares[1] is "x"; it must be a number'),
        ("adapter.dora=true", "--set adapter.dora: adapter.dora is true; it must be false with"),
        ("rank=3", "--set rank: rank is not known; did you mean adapter.rank?"),
        ("adapter.rnak=3", "--set adapter.rnak: adapter.rnak is not known; did you mean adapter."),
        ("qqqq=3", "--set qqqq: qqqq is not known; the keys are name, model, data.train"),
        ("seed=[1", "--set seed: this is not YAML: while parsing a flow sequence"),
        ("seed", "--set seed has no value"),
        ("objective=dpo", "run.yaml, line 4: packing is true; it must be false with objective dpo"),
    ],
)
def test_a_wrong_setting_is_named_with_its_option(setting: str, expected: str) -> None:
    text = f"{RIGHT}adapter: {{kind: full}}\npacking: true\n"
    with pytest.raises(UsageError) as refused:
        parse_run(text, "run.yaml", [setting])
    assert refused.value.message.startswith(expected)


def test_a_setting_replaces_what_the_file_says_and_an_empty_one_is_null(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "runs" / "run.yaml"
    file.parent.mkdir()
    file.write_text(f"{RIGHT}epochs: wrong\nmax_steps: 3\n")
    (tmp_path / "rows.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    given = ["epochs=1", "epochs=2", "max_steps=", "data.train=rows.jsonl", "compile=off"]
    spec = read_run_file(file, given)
    assert (spec.epochs, spec.max_steps, spec.compile) == (2.0, None, "off")
    assert spec.data.train == str(tmp_path / "rows.jsonl"), "relative to the current folder"


words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), min_size=1)
positive = st.floats(1e-12, 1e6)
names = st.lists(words.filter(str.strip), min_size=1, unique=True).map(tuple)
patterns = st.sampled_from(["all-linear", ".*q_proj", ".*(q|v)_proj", "[.]*layers[.][01][.].*"])
specs = st.builds(
    RunSpec,
    model=words,
    data=st.builds(DataSpec, train=words, eval=st.none() | words),
    name=words,
    adapter=st.builds(
        AdapterSpec, rank=st.integers(1, 512), alpha=positive, targets=patterns | names
    ),
    epochs=positive,
    learning_rate=st.floats(1e-12, 1.0),
    max_steps=st.none() | st.integers(1, 10**9),
    seed=st.integers(0, 2**63 - 1),
    nodes=st.just("all") | names,
    shares=st.none() | st.lists(positive, min_size=1).map(tuple),
    checkpoint=st.builds(CheckpointSpec, every_steps=st.none() | st.integers(1, 10**6)),
)


@settings(max_examples=150, deadline=None)
@given(specs)
def test_any_spec_survives_the_file(spec: RunSpec) -> None:
    assert parse_run(format_run(spec)) == spec


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=200).map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        spec = parse_run(text)
    except UsageError:
        return
    assert dataclasses.is_dataclass(spec)


@pytest.mark.parametrize("name", ["~nobody-of-that-name/t.jsonl", "t" * 300])
def test_a_name_that_no_path_can_have_is_left_as_it_is(tmp_path: Path, name: str) -> None:
    (tmp_path / "run.yaml").write_text(f"model: org/name\ndata: {{train: {name}}}\n")
    assert read_run_file(tmp_path / "run.yaml").data.train == name


def test_one_source_may_be_written_in_each_way() -> None:
    expected = parse_run("model: m\ndata: {train: a.jsonl, format: chat}\n")
    for data in (
        "{sources: [a.jsonl], format: chat}",
        "[{path: a.jsonl, format: chat}]",
        "{sources: {path}, format: text}".replace("{path}", "[{path: a.jsonl, format: chat}]"),
    ):
        assert parse_run(f"model: m\ndata: {data}\n") == expected


SEVERAL = """
model: m
data:
  sources:
    - chats.jsonl
    - path: org/name
      columns: {instruction: question, roles: {customer: user}}
      weight: 2
      max_rows: 500
      split: test
  eval: 0.05
  shuffle: false
  deduplicate: near
"""


def test_several_sources_come_back_as_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("{}")
    (tmp_path / "run.yaml").write_text(SEVERAL)
    spec = read_run_file(tmp_path / "run.yaml")
    first, second = spec.data.sources
    assert first == SourceSpec(path=str(tmp_path / "chats.jsonl"))
    assert second == SourceSpec(
        path="org/name",
        columns=("instruction=question", "roles.user=customer"),
        weight=2.0,
        max_rows=500,
        split="test",
    )
    assert (spec.data.train, spec.data.eval) == (first.path, "0.05")
    assert (spec.data.shuffle, spec.data.deduplicate) == (False, "near")
    assert parse_run(format_run(spec)) == spec


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ("[a, {path: b, weight: 0}]", "data.sources[1].weight is 0; it must be above 0 and at"),
        ("[a, {path: b, weight: -1}]", "data.sources[1].weight is -1; it must be above 0 and at"),
        ("[a, {path: b, weight: x}]", 'data.sources[1].weight is "x"; it must be a number'),
        ("[a, {path: b, weigth: 2}]", "data.sources[1].weigth is not known; did you mean data."),
        ("[a, {path: b, qqq: 2}]", "data.sources[1].qqq is not known; the keys under data.sou"),
        ("[a, {path: b, format: chatt}]", 'data.sources[1].format is "chatt"; it must be one of'),
        ("[a, {path: b, max_rows: 1.5}]", "data.sources[1].max_rows is 1.5; it must be a whole"),
        ("[a, {path: b, columns: {x: y}}]", "data.sources[1].columns names 'x'"),
        ("[a, {weight: 2}]", "data.sources[1].path is missing under data.sources[1]"),
        ("[{weight: 2}, a]", "data.sources[0].path is missing under data.sources[0]"),
        ("[a, a]", "data.sources names a twice; name it once, and let its rows count more"),
        ("[a, {path: b, format: preference}]", "data.sources[1].format is preference; with obj"),
        ("3", "data.sources is 3; it must be a list of paths, or of `path` with more keys"),
    ],
)
def test_a_wrong_source_is_one_message_with_its_line(sources: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_run(f"model: m\ndata:\n  sources: {sources}\n", "run.yaml")
    assert says in refused.value.message
    assert len(refused.value.message.splitlines()) == 1


def test_train_and_sources_are_not_both_given() -> None:
    text = "model: m\ndata: {train: x, sources: [a, b]}\n"
    with pytest.raises(UsageError, match="give train or sources, not both"):
        parse_run(text)
    assert parse_run(text, settings=["data.train=c"]).data.list_names() == ("c",)
    assert parse_run(text, settings=["data.sources=[c, d]"]).data.list_names() == ("c", "d")


@pytest.mark.parametrize(("written", "read"), [("0.05", "0.05"), ("200", "200"), ("auto", "auto")])
def test_a_part_of_the_training_data_is_held_out(written: str, read: str) -> None:
    data = parse_run(f"model: m\ndata: {{train: t, eval: {written}}}\n").data
    assert (data.eval, data.eval_path) == (read, None)
    assert data.held_out is not None


def test_a_file_of_such_a_name_is_evaluated(tmp_path: Path) -> None:
    (tmp_path / "auto").write_text("x")
    (tmp_path / "run.yaml").write_text("model: m\ndata: {train: t, eval: auto}\n")
    assert read_run_file(tmp_path / "run.yaml").data.eval_path == str(tmp_path / "auto")
