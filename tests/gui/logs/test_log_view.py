"""Logs of any size: every line is found, nothing is lost at the seams, a million opens quickly."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest

from app.gui.logs.log_document import LogDocument, make_block, split_blocks
from app.gui.logs.log_levels import ShownLines
from app.gui.logs.log_view import LogView

LINES = st.lists(st.text(alphabet="abX \u00e9", max_size=12), min_size=1, max_size=30)


def lines_of(document):
    return [document.line(n) for n in range(document.first_line, document.end_line)]


@given(LINES, st.lists(st.integers(1, 9), min_size=1, max_size=5), st.booleans())
def test_pieces_of_any_size_give_the_same_lines(lines, sizes, ends):
    data = "\n".join(lines).encode("utf-8") + (b"\n" if ends else b"")
    document, at, turn = LogDocument(), 0, 0
    while at < len(data):
        size = sizes[turn % len(sizes)]
        document.append(data[at : at + size])
        at, turn = at + size, turn + 1
    wanted = data.decode("utf-8").split("\n")
    if wanted[-1] == "":
        wanted.pop()
    assert lines_of(document) == wanted


@given(LINES, st.integers(1, 7))
def test_blocks_of_a_file_give_the_same_lines(lines, size):
    data = "\n".join(lines).encode("utf-8")
    document = LogDocument()
    for block in split_blocks(data[at : at + size] for at in range(0, len(data), size)):
        document.append_block(block)
    wanted = data.decode("utf-8").split("\n")
    if wanted[-1] == "":
        wanted.pop()
    assert lines_of(document) == wanted


def test_the_oldest_go_first_and_numbers_keep_counting():
    document = LogDocument(max_bytes=100)
    for number in range(10):
        document.append_block(make_block(f"{number:019d}\n".encode()))
    assert document.num_lines == 5
    assert document.first_line == 5
    assert document.line(9).endswith("9")


def run_search(document, words, start, *, backward=False):
    return next((n for n in document.search(words, start, backward=backward) if n is not None), -1)


@pytest.fixture
def three_blocks():
    document = LogDocument()
    for text in ("apple\nbanana\n", "cherry\nApple pie\n", "date\nelder"):
        document.append_block(make_block(text.encode()))
    return document


@pytest.mark.parametrize(
    ("words", "start", "backward", "line"),
    [
        ("apple", 0, False, 0),
        ("apple", 1, False, 3),
        ("apple", 4, False, 0),
        ("APPLE", 2, True, 0),
        ("apple", 5, True, 3),
        ("elder", 0, False, 5),
        ("elder", 0, True, 5),
        ("nothing", 2, False, -1),
        ("", 0, False, -1),
    ],
)
def test_search_goes_both_ways_and_round_the_end(three_blocks, words, start, backward, line):
    assert run_search(three_blocks, words, start, backward=backward) == line


@pytest.fixture
def view(application, theme):
    made = LogView(theme)
    made.resize(800, 400)
    made.show()
    yield made
    made.deleteLater()


@pytest.mark.alone
def test_a_million_lines_open_quickly_scroll_smoothly_and_are_searched_without_freezing(
    application, view
):
    data = b"".join(
        b"2026-11-21 step %07d loss 1.2345 some more words here\n" % n for n in range(1_000_000)
    )
    pieces = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
    blocks = list(split_blocks(iter(pieces)))  # the core's thread does this
    longest = 0.0
    begin_s = time.perf_counter()
    for block in blocks:
        step_s = time.perf_counter()
        view.append_block(block)
        application.processEvents()
        longest = max(longest, time.perf_counter() - step_s)
    opened_s = time.perf_counter() - begin_s
    assert view.document.num_lines == 1_000_000
    assert opened_s < 0.5 * 4, "0.5 s on a quiet PC"
    frames = []
    for value in range(0, 1_000_000, 20_000):
        step_s = time.perf_counter()
        view.verticalScrollBar().setValue(value)
        view.viewport().repaint()
        frames.append(time.perf_counter() - step_s)
    assert sorted(frames)[len(frames) // 2] < 1 / 60
    found = []
    view.searched.connect(found.append)
    view.verticalScrollBar().setValue(0)
    view.search("step 0999998")
    while not found:
        step_s = time.perf_counter()
        application.processEvents()
        longest = max(longest, time.perf_counter() - step_s)
    assert found == [True]
    assert view.found_line == 999_998
    assert longest < 0.1, "50 ms on a quiet PC"


def test_new_lines_do_not_move_what_is_being_read(application, view):
    for number in range(500):
        view.append(b"line %d\n" % number)
    bar = view.verticalScrollBar()
    assert view.is_following
    assert bar.value() == bar.maximum()
    bar.setValue(100)
    assert not view.is_following
    view.append(b"one more\n" * 50)
    assert bar.value() == 100
    QTest.keyClick(view, Qt.Key.Key_End)
    assert view.is_following
    view.append(b"and more\n" * 50)
    assert bar.value() == bar.maximum()


def test_marked_lines_are_copied(application, view):
    view.append(b"one\ntwo\nthree\n")
    QTest.keyClick(view, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    QTest.keyClick(view, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert application.clipboard().text() == "one\ntwo\nthree"


LOG = b"""step 1 loss 2.0
UserWarning: slow disk
step 2 loss 1.9
Traceback (most recent call last):
  File "x.py", line 3
    boom()
ValueError: no
step 3 loss 1.8
"""


@pytest.mark.parametrize(
    ("level", "numbers"),
    [("all", list(range(8))), ("warnings", [1, 3, 4, 5, 6]), ("errors", [3, 4, 5, 6])],
)
def test_levels_choose_lines_and_keep_their_numbers(level, numbers):
    document = LogDocument()
    document.append(LOG)
    shown = ShownLines(document)
    shown.choose(level)
    assert [shown.number(row) for row in range(len(shown))] == numbers
    assert [shown.row_of(number) for number in numbers] == list(range(len(numbers)))
    document.append(b"OSError: gone\n")
    shown.refresh()
    assert shown.number(len(shown) - 1) == 8


def test_a_line_that_is_found_is_shown(view):
    view.append(LOG * 40)
    levels = []
    view.level_changed.connect(levels.append)
    view.show_level("errors")
    assert len(view.shown) == 160
    view.resize(600, 200)
    view.grab()
    QTest.keyClick(view, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    assert view.marked_text().count("\n") == 159
    view.search("step 3 loss")
    for _ in range(50):
        view._search_on()
        if levels == ["errors", "all"]:
            break
    assert levels == ["errors", "all"]
    assert view.document.line(view.found_line) == "step 3 loss 1.8"


def test_nothing_that_warns_is_said(view):
    view.append(b"step 1\nstep 2\n")
    view.show_level("warnings")
    assert len(view.shown) == 0
    view.grab()
    view.append(b"a Warning\n")
    assert [view.shown.number(0)] == [2]
