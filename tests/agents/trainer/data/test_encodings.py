"""Files in other encodings: the likely one is offered, and read once it is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from agents.contract.spec import DataSpec
from agents.errors import ExpectedError
from agents.shared.data.encodings import guess_encoding
from agents.trainer.data.rows import RowReader, find_files
from agents.trainer.data.tally import Tally
from app.errors import UserError
from app.library.data import check_form

JAPANESE = "\u65e5\u672c\u306e\u9996\u90fd\u306f\u3069\u3053\u3067\u3059\u304b"
# Text, encoding of the file, and the offered one.
TEXTS = (
    ("Gr\xf6\xdfe sch\xf6n?", "cp1252", "cp1252"),
    ("\xe9l\xe8ve \xe0 c\xf4t\xe9", "latin-1", "cp1252"),
    ("P\u0159\xedli\u0161 \u017elu\u0165ou\u010dk\xfd", "cp1250", "cp1250"),
    ("Wczoraj by\u0142o \u015bwietnie. P\xf3\u017aniej", "cp1250", "cp1250"),
    ("Wczoraj by\u0142o \u015bwietnie. P\xf3\u017aniej", "iso8859_2", "iso8859_2"),
    ("\u0412\u0447\u0435\u0440\u0430 \u0432\u0441\u0435\u043c", "koi8_r", "koi8_r"),
    ("\u041a\u0430\u043a\u0430\u044f \u0441\u0442\u0430\u043b\u044c?", "cp1251", "cp1251"),
    ("\u4f60\u597d\uff0c\u4eca\u5929\u5929\u6c14\u5f88\u597d", "gbk", "gb18030"),
    ("\u4f60\u597d\uff0c\u4eca\u5929\u5929\u6c23\u5f88\u597d", "big5", "big5"),
    (JAPANESE, "shift_jis", "shift_jis"),
    (JAPANESE, "euc_jp", "euc_jp"),
    ("\ud55c\uad6d\uc758 \uc218\ub3c4\ub294", "euc_kr", "euc_kr"),
    ("plain", "utf-16-le", "utf-16-le"),
    ("\u4f60\u597d", "utf-16-be", "utf-16-be"),
    ("plain", "utf-16", "utf-16"),
)  # fmt: skip
LINE = '{{"instruction": "{0} {1}", "output": "{1} {0}"}}\n'


def read(path: Path, encoding: str) -> list[tuple[str, ...]]:
    tally = Tally(name=path.name)
    data = DataSpec(train="-", encoding=encoding)  # type: ignore[arg-type] # one of the table
    rows = list(RowReader(find_files(path), data, "sft", tally))
    tally.check_usable(len(rows))
    return [tuple(turn.content for turn in row.turns) for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".txt"])
@pytest.mark.parametrize(("text", "encoding", "offered"), TEXTS)
def test_offers_and_reads(
    tmp_path: Path, text: str, encoding: str, offered: str, suffix: str
) -> None:
    path = tmp_path / f"a{suffix}"
    rows = [LINE.format(text, number) for number in range(12)]
    if suffix == ".csv":
        rows = ["instruction,output\n", *(f"{text} {at},{at} {text}\n" for at in range(12))]
    path.write_bytes("".join(rows).encode(encoding))
    if suffix != ".txt":
        with pytest.raises(ExpectedError) as refused:
            read(path, "utf-8")
        assert f"data.encoding: {offered}" in refused.value.hint
    with pytest.raises(UserError) as early:
        check_form(path, data=DataSpec(train="-", format="text" if suffix == ".txt" else "auto"))
    assert f"data.encoding: {offered}" in early.value.hint
    if suffix == ".txt":
        return
    assert read(path, offered)[3] == (f"{text} 3", f"3 {text}")
    check_form(path, data=DataSpec(train="-", encoding=offered))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["", "plain", "Gr\xf6\xdfe", "a zero byte\0 in it\n" * 9, "\u4f60\u597d", "\U0001f600"]
)
def test_offers_nothing_for_utf8(text: str) -> None:
    assert guess_encoding(text.encode()) == ""


def test_wrong_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes("".join(LINE.format("Gr\xf6\xdfe", at) for at in range(9)).encode("cp1252"))
    with pytest.raises(ExpectedError, match="is not text in shift_jis") as refused:
        read(path, "shift_jis")
    assert refused.value.hint == "Set data.encoding: cp1252"
    with pytest.raises(UserError, match="is not text in shift_jis"):
        check_form(path, data=DataSpec(train="-", encoding="shift_jis"))


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_without_a_mark_is_guessed_by_its_pairs(encoding: str) -> None:
    text = "\n".join(f"{JAPANESE * 3} {number}" for number in range(9))
    assert guess_encoding(text.encode(encoding)) == encoding


# Sentences in Greek, Turkish and Lithuanian.
OTHERS = (
    ("cp1253", "\u03a7\u03b8\u03b5\u03c2 \u03c0\u03ae\u03b3\u03b1\u03bc\u03b5"),
    ("cp1254", "\u015e\u0131\u011f\u0131na\u011f\u0131n i\xe7inde \u0131\u015f\u0131k var"),
    ("cp1257", "Vakar \u0117jome \u012f kin\u0105, \u017e\u0105sys \u0161oka"),
)  # fmt: skip


@pytest.mark.parametrize(("encoding", "text"), OTHERS)
def test_offers_nothing_for_other_alphabets(tmp_path: Path, encoding: str, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINE.format(text, 1).encode(encoding))
    with pytest.raises(ExpectedError) as refused:
        read(path, "utf-8")
    assert refused.value.hint.startswith("Set data.encoding to that of the file, or save")
