"""Names that are markup, on every page, dialog and step of the window."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import QAbstractItemModel, QModelIndex, QPoint, Qt
from PySide6.QtGui import QHelpEvent, QTextDocument
from PySide6.QtGui import Qt as RichText
from PySide6.QtWidgets import (
    QAbstractItemView,
    QApplication,
    QComboBox,
    QLabel,
    QTextEdit,
    QToolTip,
    QWidget,
)

from agents.contract.requests.exports import Origin
from app.artifacts.record import _describe_merged
from app.gui.charts.curves import Curves
from app.gui.charts.limits import Limits
from app.gui.charts.line import LineSeries
from app.gui.charts.table import format_table
from app.gui.kit.primitives import make_tooltip, plain_for_desktop
from app.gui.kit.reader import is_web_page
from app.gui.kit.theme import Theme
from app.gui.overview.card import DeviceCard
from tests.fakes.core import FakeCore
from tests.gui.conftest import application, garbage, make_stage, theme  # noqa: F401
from tests.gui.pictures import BUSY, _end, make_stage_of

Attack = Callable[..., None]
GUI = Path(__file__).resolve().parents[2] / "app" / "gui"
MARK = "stranger"
EVIL = (
    f"{MARK}<b>b</b><img src='file:///dev/{MARK}'><a href='file:///etc/{MARK}'>a</a>"
    "<table background='file:///dev/x'><tr><td>c</table> &lt;i&gt; &amp; \x1b[2J\u202e"
)
# Fields with text of others; the values of other fields are keys or words of ours.
TEXTS = frozenset(
    {"message", "text", "hint", "problem", "problems", "fix", "evidence", "cpu", "gpu_problem"}
    | {"hostname", "title", "says", "reason", "notes", "note", "details", "output", "licence"}
    | {"explanation", "description", "prompt", "summary", "command", "figures", "question"}
)
NAMED = frozenset({"RunSnapshot", "GpuFacts", "GpuSample", "Verdict"})
# Their texts say which node or file is meant, or are compared by the window.
KEPT = frozenset({"RunSpec", "DataSpec", "Repair", "RepairStep", "FileEdit", "Probe", "Recipe"})


def taint(value: Any) -> Any:
    """Return a value with markup at the end of all texts that come from others."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value).__name__
        if kind in KEPT:
            return value
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = taint(old)
            if field.name in TEXTS or (field.name == "name" and kind in NAMED):
                new = taint_text(old, str(field.type))
            if new is not old:
                # Most of them are frozen, and some check what these tests falsify.
                object.__setattr__(value, field.name, new)
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(taint(one) for one in value)
    if isinstance(value, list):
        return [taint(one) for one in value]
    if isinstance(value, Mapping) and type(value) is dict:
        return {key: taint(one) for key, one in value.items()}
    return value


def taint_text(value: Any, kind: str) -> Any:
    """Return a text, or several, with markup at the end; anything else is left alone."""
    if isinstance(value, tuple):
        return tuple(taint_text(one, kind) for one in value)
    if not isinstance(value, str) or not value or MARK in value or "Literal" in kind:
        return value if isinstance(value, str) else taint(value)
    return f"{value} {EVIL}"


def falsify(core: FakeCore) -> None:
    """Put markup into all that a core knows and answers."""
    for name in ("node_map", "run_map", "event_map", "artifact_map", "preview_map", "link_list"):
        setattr(core, name, taint(getattr(core, name)))
    for action, answer in list(core.answers.items()):

        async def falsified(*args: Any, answer: Any = answer) -> Any:
            return taint(await answer(*args))

        core.answers[action] = falsified


def is_rich(text: str) -> bool:
    return bool(RichText.mightBeRichText(text))


def is_harmless_tip(tip: str) -> bool:
    """Return whether Qt shows a tooltip as plain text, or as HTML of ours with escaped text."""
    if not is_rich(tip):
        return True
    inside = re.fullmatch(r'<p style="white-space:pre-wrap">([^<>]*)</p>', tip, re.DOTALL)
    return inside is not None


def find_rendered(top: QWidget) -> Iterator[str]:
    """Yield what a window would render as markup."""
    for widget in (top, *top.findChildren(QWidget)):
        name = f"{type(widget).__name__} {widget.objectName()}"
        if not is_harmless_tip(widget.toolTip()):
            yield f"{name}: tooltip {widget.toolTip()[:200]}"
        for action in widget.actions():
            if not is_harmless_tip(action.toolTip()):
                yield f"{name}: action {action.toolTip()[:200]}"
        is_plain = isinstance(widget, QLabel) and widget.textFormat() == Qt.TextFormat.PlainText
        if isinstance(widget, QLabel) and not is_plain and is_rich(widget.text()):
            yield f"{name}: label {widget.text()[:200]}"
        if isinstance(widget, QTextEdit):
            yield from (f"{name}: {one}" for one in find_loaded(widget.document()))
        model = widget.model() if isinstance(widget, (QAbstractItemView, QComboBox)) else None
        if model is not None:
            yield from (f"{name}: {one}" for one in find_tips(model))


def find_loaded(document: QTextDocument) -> Iterator[str]:
    """Yield images and links of a document, except links to web pages."""
    block = document.begin()
    while block.isValid():
        found = block.begin()
        while not found.atEnd():
            form = found.fragment().charFormat()
            if form.isImageFormat() or (form.isAnchor() and not is_web_page(form.anchorHref())):
                yield f"text {found.fragment().text()[:80]}"
            found += 1
        block = block.next()


def find_tips(model: QAbstractItemModel) -> Iterator[str]:
    """Yield the tooltips of a model that Qt would render as markup."""
    role = Qt.ItemDataRole.ToolTipRole
    tips = [
        model.headerData(column, Qt.Orientation.Horizontal, role)
        for column in range(model.columnCount(QModelIndex()))
    ]
    for row in range(min(model.rowCount(QModelIndex()), 30)):
        for column in range(model.columnCount(QModelIndex())):
            tips.append(model.index(row, column).data(role))
    yield from (f"cell {tip[:200]}" for tip in tips if tip and not is_harmless_tip(str(tip)))


def test_no_page_or_dialog_renders_a_name_that_is_markup(
    application: QApplication,  # noqa: F811
    theme: Theme,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Attack,
) -> None:
    shown_tips: list[str] = []
    monkeypatch.setattr(QToolTip, "showText", lambda place, tip, *more: shown_tips.append(tip))
    found: list[str] = []
    seen = 0
    for name in BUSY:
        stage, widget = make_stage_of(application, theme, name, tmp_path, alter=falsify)
        widget.grab()  # some tooltips are set while painting
        for card in widget.findChildren(DeviceCard):
            for x in range(4, card.width(), 12):
                for y in range(4, card.height(), 12):
                    place = QPoint(x, y)
                    card.event(QHelpEvent(QHelpEvent.Type.ToolTip, place, card.mapToGlobal(place)))
        for top in {widget, stage.window}:
            found += [f"{name}: {one}" for one in find_rendered(top)]
        seen += any(MARK in label.text() for label in widget.findChildren(QLabel))
        crashes = stage.crashes
        _end(stage, widget)
        assert crashes == [], name
    attack(given="names that are markup", tried=f"{len(BUSY)} scenes", happened=f"{found[:3]}")
    assert found == []
    assert seen > 20, "the names did not reach the window"
    assert any(MARK in tip for tip in shown_tips)
    assert all(map(is_harmless_tip, shown_tips))


def test_every_tooltip_is_set_by_the_one_function() -> None:
    """`setToolTip` outside it, QToolTip, and roles of models without `make_tooltip` are found."""
    wrong = []
    for path in sorted(GUI.rglob("*.py")):
        name, text = path.relative_to(GUI).as_posix(), path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called, given = node.func.attr, ast.unparse(node.args[0]) if node.args else ""
                is_ours = name == "kit/primitives.py" and "make_tooltip" in ast.unparse(node)
                is_tray = name == "shell/tray.py" and given.startswith("plain_for_desktop(")
                if called in ("setToolTip", "showText") and not is_ours and not is_tray:
                    wrong.append(f"{name}: {ast.unparse(node)[:80]}")
                if called == "showMessage" and not is_tray:
                    wrong.append(f"{name}: {ast.unparse(node)[:80]}")
            if isinstance(node, ast.If) and "ToolTipRole" in ast.unparse(node.test):
                returned = [one for one in node.body if isinstance(one, ast.Return)]
                if not all("make_tooltip(" in ast.unparse(one) for one in returned):
                    wrong.append(f"{name}: {ast.unparse(node)[:80]}")
        for sink in ("QMessageBox", "setHtml(", "insertHtml(", "setWhatsThis", "QErrorMessage"):
            # These three escape what they show.
            known = ("new_run/data_view.py", "chat/transcript.py", "data/row_pane.py")
            if sink in text and not (sink == "setHtml(" and name in known):
                wrong.append(f"{name}: {sink}")
        if re.search(r"QLabel\((?!\))", text):
            wrong.append(f"{name}: a label that is not plain")
    assert wrong == []


@pytest.mark.parametrize("text", [EVIL, "<img src=x>", "&lt;img src=x&gt;", "a<b", "&#60;b&#62;"])
def test_a_notification_has_neither_tags_nor_entities(text: str) -> None:
    shown = plain_for_desktop(text)
    assert not re.search(r"[<>]|&#?\w+;|[\x00-\x1f\u202e]", shown)
    assert is_harmless_tip(make_tooltip(text))


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1", "@x", " =1", "a\tb\n=1"])
def test_a_name_is_no_formula_and_no_other_cell_of_a_copied_table(name: str) -> None:
    curves = Curves()
    curves.extend(1, [1.0], [2.0])
    lines = [LineSeries(name=one, curves=curves, color="accent") for one in (name, "plain")]
    rows = format_table(lines, Limits(0.0, 9.0)).splitlines()
    assert len(rows) == 3
    assert {len(row.split("\t")) for row in rows} == {4}
    assert not rows[1].lstrip().startswith(("=", "+", "-", "@"))


def test_a_card_has_no_markup_and_no_front_matter_of_a_stranger() -> None:
    origin = Origin(
        base="x`\n<img src='file:///dev/zero'>",
        data=EVIL,
        run_id="r-1",
        run_name="poems\n---\nlicense: other <script>",
        step=1,
        licence="mit\nbase_model: bank/model",
    )
    card = _describe_merged(origin)
    assert card.startswith("---\ntags: [rackless, merged]\n---\n# poems --- license: other")
    assert not re.search(r"(?<!\\)<script", card)
    assert "\n<img" not in card
    assert not re.search("^base_model", card, re.MULTILINE)
