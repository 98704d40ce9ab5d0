"""A run keeps the text of the chat template that its file names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agents.contract.spec import DataSpec, RunSpec
from app.errors import UserError
from app.library.chat_template import read_template, settle_template
from app.runfile.run_file import format_run, parse_run, read_run_file

TEXT = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\u00e4</s>{% endfor %}\n"


def test_a_known_name_and_a_text_stay(tmp_path: Path) -> None:
    assert read_template("chatml") == "chatml"
    assert read_template(TEXT) == TEXT
    spec = RunSpec(model="m", data=DataSpec(train="t"))
    assert settle_template(spec) is spec


def test_a_file_a_folder_and_a_model_of_the_cache_give_their_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.jinja"
    own.write_text(TEXT, encoding="utf-8")
    assert read_template(str(own)) == TEXT
    for name, several in (("text", TEXT), ("list", [{"name": "default", "template": TEXT}])):
        folder = tmp_path / name
        folder.mkdir()
        settings = json.dumps({"chat_template": several})
        (folder / "tokenizer_config.json").write_text(settings)
        assert read_template(str(folder)) == TEXT
    (tmp_path / "text" / "chat_template.jinja").write_text("{{ other }}")
    assert read_template(str(tmp_path / "text")) == "{{ other }}"
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "chat_template.jinja").write_text(TEXT, encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert read_template("org/name") == TEXT


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chatlm", None, "one of chatml, llama-3"),
        ("../org/name", None, "no file and no model"),
        ("plain.txt", b"USER: ", "holds no Jinja template"),
        ("bytes.jinja", b"\xff{{ a }}", "cannot be read"),
        ("huge.jinja", b"{{ a }}" * 200_000, "at most"),
        ("odd.json", b"{", "cannot be read"),
    ],
)
def test_what_is_no_template_is_named(
    tmp_path: Path, name: str, content: bytes | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
        name = str(tmp_path / name)
    with pytest.raises(UserError) as refused:
        read_template(name)
    assert refused.value.message.startswith("data.chat_template: ")
    assert reason in f"{refused.value.message} {refused.value.hint}"


def test_a_file_next_to_the_run_file_is_found_and_its_text_survives(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(TEXT, encoding="utf-8")
    keys = "data: {train: t, chat_template: own.jinja, template_options: {a: false, b: high}}"
    (tmp_path / "run.yaml").write_text(f"model: m\n{keys}\n")
    spec = settle_template(read_run_file(tmp_path / "run.yaml"))
    assert spec.data.chat_template == TEXT
    assert spec.data.template_options == ("a=false", "b=high")
    assert parse_run(format_run(spec)) == spec
