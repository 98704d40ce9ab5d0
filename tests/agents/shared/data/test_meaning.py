"""Data that means something else than what would be learned is refused, or named with its share."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agents.contract.data import DataPreview
from agents.contract.requests.jobs import PreviewJob
from agents.contract.spec import DataSpec, RunSpec
from agents.errors import ExpectedError
from agents.trainer.data import preview
from agents.trainer.data.cache import load_examples
from agents.trainer.data.hub import find_data
from agents.trainer.data.tokenizer import load_tokenizer
from tests.agents.trainer.ranks import DEMO

QA = {"prompt": "Who founded Brenford?", "completion": "Oren Dale."}
CHAT = {
    "messages": [
        {"role": "user", "content": "Who founded Brenford?"},
        {"role": "assistant", "content": "Oren Dale."},
    ]
}
ALPACA = {"instruction": "Who founded it?", "input": "", "output": "Oren Dale."}
PAIR = {"prompt": "Who founded it?", "chosen": "Oren Dale.", "rejected": "Nobody."}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO / "model")[0]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_spec(path, **changes):
    names = ("format", "ignore_columns", "long_text")
    data = {key: changes.pop(key) for key in names if key in changes}
    data = DataSpec(train=str(path), **data)
    return RunSpec(model="m", data=data, **{"sequence_tokens": 64, **changes})


def train(path, tokenizer, **changes):
    """Return the examples that a rank would train on."""
    files = find_data(str(path))
    cache = path.with_name("cache")
    return load_examples(files, path.name, make_spec(path, **changes), tokenizer, cache)


def look(path, *, whole=True, **changes) -> DataPreview:
    job = PreviewJob(
        python="",
        spec=make_spec(path, **changes),
        model_path=str(DEMO / "model"),
        train_path=str(path),
        whole=whole,
    )
    return preview.preview(job, path.parent)


def find(found, column):
    (one,) = (one for one in found.findings if one.column == column)
    return one


WRONG = {
    "kto": (QA, "label", [True, False]),
    "kto-chat": (CHAT, "label", [True, False]),
    "kto-int": (QA, "label", [1, 0]),
    "kto-tag": (CHAT, "kto_tag", [True, False]),
    "good": (ALPACA, "is_good", [True, False]),
    "camel": (CHAT, "isCorrect", [True, False]),
    "thumbs": (CHAT, "thumbs", ["up", "down"]),
    "thumbs-down": (QA, "thumbs_down", [False, True]),
    "emoji": (QA, "reaction", ["\N{THUMBS UP SIGN}", "\N{THUMBS DOWN SIGN}"]),
    "csv weight": (QA, "sample_weight", ["1.0", "0.2"]),
    "earlier turns": (ALPACA, "previous_messages", [[], CHAT["messages"]]),
    "words": (CHAT, "feedback", ["good", "bad"]),
    "images": (CHAT, "images", [[], ["a/1.png"]]),
    "llava": (CHAT, "image", [None, "coco/1.jpg"]),
    "path": (ALPACA, "image_path", ["", "1.png"]),
    "pixels": (QA, "pixel_values", [None, [[0.5]]]),
    "audio": (CHAT, "audios", [None, ["a.wav"]]),
    "unheard-of": (CHAT, "scan", ["", "pages/1.TIFF"]),
    "history": (ALPACA, "history", ["", "Ann asked who founded the town."]),
    "dolly": (ALPACA, "context", ["", "Brenford was founded by Oren Dale."]),
    "orca": (QA, "system_prompt", ["", "Answer as a pirate."]),
    "choices": (ALPACA, "choices", [[], ["Ann", "Oren"]]),
    "weight": (CHAT, "weight", [1.0, 0.0]),
    "mask": (QA, "loss_mask", [[1, 1], [1, 0]]),
    "second question": (ALPACA, "question", ["", "And who lives there?"]),
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", sorted(WRONG))
def test_a_column_that_says_that_rows_mean_something_else_refuses_the_data(
    tmp_path, tokenizer, kind, suffix
):
    row, column, values = WRONG[kind]
    rows = [{**row, column: value} for value in values * 5]
    path = write(tmp_path / f"a{suffix}", rows)
    objective = "dpo" if row is PAIR else "sft"
    with pytest.raises(ExpectedError) as refused:
        train(path, tokenizer, objective=objective)
    assert f"'{column}'" in refused.value.message
    assert f"in 5 of 10 rows (50 %), the first of them row 2, '{column}'" in refused.value.message
    assert f"data.ignore_columns: [{column}]" in refused.value.hint
    kept = train(path, tokenizer, objective=objective, ignore_columns=(column,))
    assert len(kept) == 10
    assert find(kept, column).kind == "ignored"


@pytest.mark.parametrize(
    ("row", "column", "value"),
    [
        (QA, "label", True),
        (CHAT, "images", []),
        (ALPACA, "history", None),
        (ALPACA, "history", [["", ""]]),
        (CHAT, "weight", 1),
        (ALPACA, "text", "Below is an instruction. Who founded it? Oren Dale."),
        (CHAT, "prompt", "Who founded Brenford?"),
        (CHAT, "num_images", 0),
        (CHAT, "training_source", "web"),
        (QA, "operating_system", "Linux"),
        ({"text": "Oren Dale founded it."}, "label", 3),
        (CHAT, "url", "https://a.example/1.png"),
    ],
)
def test_a_column_that_changes_nothing_is_listed_at_most(tmp_path, tokenizer, row, column, value):
    rows = [{**row, column: value} for _ in range(4)]
    found = train(write(tmp_path / "a.jsonl", rows), tokenizer)
    assert len(found) == 4
    assert all(one.consequence == "note" for one in found.findings)


@pytest.mark.parametrize(
    ("row", "column", "kind"),
    [
        ({**PAIR, "score_chosen": 1.0, "score_rejected": 4.0}, "score_chosen", "reversed"),
        ({**QA, "verification": "incorrect"}, "verification", "verdict"),
        ({**QA, "rating": 1}, "rating", "score"),
        ({**QA, "split": "test"}, "split", "split"),
        ({**QA, "rationale": "It was he."}, "rationale", "reasoning"),
        ({"text": "Oren Dale.", "label": False}, "label", "verdict"),
        ({"text": "Oren Dale.", "video_id": "k3"}, "video_id", "media"),
    ],
)
def test_a_column_that_may_change_what_rows_mean_is_named(tmp_path, tokenizer, row, column, kind):
    objective = "dpo" if "chosen" in row else "sft"
    found = train(write(tmp_path / "a.jsonl", [row]), tokenizer, objective=objective)
    kinds = [(one.kind, one.consequence) for one in found.findings if one.column == column]
    assert (kind, "warn") in kinds


def test_pictures_inside_of_a_table_are_refused_without_being_read(tmp_path, tokenizer):
    rows = [{**CHAT, "photo": {"bytes": b"\x89PNG" * 1000, "path": None}} for _ in range(3)]
    with pytest.raises(ExpectedError, match=r"in 3 of 3 rows.*'photo' holds pictures"):
        train(write(tmp_path / "a.parquet", rows), tokenizer)


def test_a_preview_names_every_column_that_is_not_used_with_its_share(tmp_path):
    rows = [{**CHAT, "source": "web", "score": number / 2} for number in range(8)]
    rows[0]["notes"] = "new"
    rows[1]["messages"] = [{"role": "user", "content": "<image>Who?"}, CHAT["messages"][1]]
    for whole in (True, False):
        found = look(write(tmp_path / "a.jsonl", rows), whole=whole)
        assert (find(found, "source").consequence, find(found, "source").share) == ("note", 1.0)
        assert (find(found, "notes").kind, find(found, "notes").count) == ("unknown", 1)
        assert (find(found, "score").kind, find(found, "score").consequence) == ("score", "warn")
        marker = find(found, "<image>")
        assert (marker.kind, marker.row, marker.total) == ("placeholder", 2, 8)
        assert not found.is_refused


def test_a_preview_shows_data_that_a_run_refuses(tmp_path):
    rows = [{**QA, "label": number % 4 != 0} for number in range(2000)]
    found = look(write(tmp_path / "a.jsonl", rows))
    assert found.is_refused
    assert (find(found, "label").count, find(found, "label").total) == (250, 1000)
    assert len(found.rows) == 3
    quick = look(tmp_path / "a.jsonl", whole=False)
    assert quick.is_refused
    assert not list((tmp_path / "cache").glob("tokens/*/about.json"))


THINKING = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}\n"
THINKING += "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


def test_reasoning_is_learned_where_the_template_has_a_place_and_named_where_not(
    tmp_path, tokenizer
):
    user, answer = CHAT["messages"]
    thought = {"messages": [user, {**answer, "reasoning_content": "It was Oren.", "id": "7"}]}
    path = write(tmp_path / "a.jsonl", [CHAT, thought])
    found = train(path, tokenizer)
    dropped = find(found, "messages[].reasoning_content")
    assert (dropped.kind, dropped.count, dropped.consequence) == ("template", 1, "warn")
    assert find(found, "messages[].id").consequence == "note"
    other = load_tokenizer(DEMO / "model")[0]
    other.chat_template = THINKING
    found = train(path, other)
    columns = [one.column for one in found.findings if one.kind != "unended"]
    assert columns == ["messages[].id"]
    (segment,) = found.first_rows(2)[1]
    learned = other.decode(segment.ids[segment.is_target])
    assert "It was Oren.Oren Dale." in learned


def test_a_quick_preview_gives_the_share_of_all_rows_that_it_has_read(tmp_path):
    user, answer = CHAT["messages"]
    rows = [{"messages": [user, {**answer, "reasoning_content": "It was he."}]}] * 500
    found = find(
        look(write(tmp_path / "a.jsonl", rows), whole=False), "messages[].reasoning_content"
    )
    assert (found.kind, found.count, found.total) == ("template", 500, 500)


def test_the_share_of_tokens_that_is_cut_is_told_with_the_worst_file(tmp_path, tokenizer):
    folder = tmp_path / "d"
    folder.mkdir()
    write(folder / "long.jsonl", [{"text": "The river runs on. " * 100}] * 3)
    write(folder / "short.jsonl", [{"text": "The river."}] * 3)
    found = train(folder, tokenizer, long_text="cut")
    (cut,) = (one for one in found.findings if one.kind == "cut")
    assert cut.consequence == "warn"
    assert cut.total - cut.count == found.num_tokens.sum()
    assert cut.file == "long.jsonl"
    assert cut.file_share is not None
    assert cut.file_share > cut.share > 0.8
    whole = train(folder, tokenizer, sequence_tokens=4096)
    assert not whole.findings
    assert int(whole.num_tokens.sum()) == cut.total


def test_a_row_that_loses_all_its_answer_counts_as_cut(tmp_path, tokenizer):
    rows = [CHAT, {"messages": [{"role": "user", "content": "river " * 900}, CHAT["messages"][1]]}]
    found = train(write(tmp_path / "a.jsonl", rows), tokenizer)
    (cut,) = (one for one in found.findings if one.kind == "cut")
    assert (found.num_skipped, cut.total - cut.count) == (1, found.num_tokens.sum())


def test_a_very_long_text_keeps_its_beginning_and_counts_whole(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("agents.trainer.data.tokens._CHARS_AT_ONCE", 2000)
    monkeypatch.setattr("agents.trainer.data.tokens._PIECE_CHARS", 1000)
    path = write(tmp_path / "a.jsonl", [{"text": "The river runs on. " * 500}])
    found = train(path, tokenizer, long_text="cut")
    monkeypatch.undo()
    (tmp_path / "b").mkdir()
    path = write(tmp_path / "b" / "a.jsonl", [{"text": "The river runs on. " * 500}])
    other = train(path, tokenizer, long_text="cut")
    assert found.first_rows(1)[0][0].ids.tolist() == other.first_rows(1)[0][0].ids.tolist()
    (one,), (two,) = found.findings, other.findings
    assert abs(one.total - two.total) <= 10
