"""Cards of strangers: no text may make the window read a file, ask a computer, or stop."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PySide6.QtCore import QObject, QPoint, Qt, QUrl, Slot
from PySide6.QtGui import QColor, QDesktopServices, QImage, QTextCursor
from PySide6.QtTest import QTest

from app.artifact import ArtifactCopy, ArtifactSnapshot
from app.artifacts.record import read_card
from app.gui.chat.transcript import Exchange, Transcript
from app.gui.kit.markdown_view import MarkdownView
from tests.gui.conftest import application, busy, garbage, make_stage, theme  # noqa: F401
from tests.gui.stage import Stage

Attack = Callable[..., None]
REPOSITORY = Path(__file__).resolve().parents[2]
SCHEMES = ("file", "http", "mailto", "ftp", "smb", "javascript", "data", "ms-settings", "https")
RED = QColor(255, 0, 0)

# In a process of its own, with little memory: what it shows must not be able to end these tests.
SHOW = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from PySide6.QtWidgets import QApplication
application = QApplication([])
from app.gui.kit.markdown_view import MarkdownView
view = MarkdownView()
view.show_markdown(sys.argv[1])
view.show()
view.grab()
application.processEvents()
print("shown")
"""


class Opened(QObject):
    """Receives what would have gone to the system."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    @Slot(QUrl)
    def take(self, url: QUrl) -> None:
        self.addresses.append(url.toString())


@pytest.fixture
def opened() -> object:
    receiver = Opened()
    for scheme in SCHEMES:
        QDesktopServices.setUrlHandler(scheme, receiver, "take")
    yield receiver
    for scheme in SCHEMES:
        QDesktopServices.unsetUrlHandler(scheme)


def click_everywhere(view: MarkdownView) -> None:
    """Click every word."""
    view.setParent(None)  # its tab may not be in front
    view.resize(700, 500)
    view.show()
    cursor = QTextCursor(view.document())
    while cursor.movePosition(QTextCursor.MoveOperation.NextWord):
        place = view.cursorRect(cursor).center() + QPoint(3, 0)
        QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, pos=place)


@pytest.mark.parametrize("name", ["/dev/zero", "PIPE"])
def test_an_image_that_never_ends_cannot_stop_the_window(
    tmp_path: Path, name: str, attack: Attack
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    name = name.replace("PIPE", str(pipe))
    card = f"# Poems\n\n![a](file://{name})\n\n<img src='file://{name}'>\n\n![b]({name})"
    shown = subprocess.run(
        [sys.executable, "-c", SHOW, card],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "QT_QPA_PLATFORM": "offscreen"},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    attack(
        given=f"a card with the image file://{name}",
        tried="show it",
        happened=shown.stdout.strip() or shown.stderr[-80:],
    )
    assert (shown.returncode, shown.stdout.strip()) == (0, "shown")


FORMS = (
    "![picture]({file})",
    "![picture](<{url}>)",
    "[![picture]({url})](https://x.org)",
    "![picture][1]\n\n[1]: {url}",
    "<img src='{url}' width=200 height=200>",
    "text <img src='{file}' width=200 height=200> text",
    "<table background='{url}'><tr><td width=200 height=200>x</td></tr></table>",
    "<p style=\"background-image:url('{url}')\">a</p>",
    "<style>body {{ background-image: url({url}) }}</style>\n\na",
    "| a |\n|---|\n| ![picture]({url}) |",
)


@pytest.mark.parametrize("form", FORMS)
def test_no_text_shows_a_file_of_this_pc(
    busy: Stage,  # noqa: F811
    tmp_path: Path,
    form: str,
    attack: Attack,
) -> None:
    image = QImage(200, 200, QImage.Format.Format_RGB32)
    image.fill(RED)
    image.save(str(tmp_path / "red.png"))
    file = tmp_path / "red.png"
    details = busy.window.artifacts.details
    details.show_card(form.format(file=file, url=file.as_uri()))
    details.card.resize(600, 400)
    seen = details.card.grab().toImage()
    reds = sum(seen.pixelColor(x, y) == RED for x in range(0, 600, 20) for y in range(0, 400, 20))
    words = " ".join(details.card.toPlainText().split())
    attack(given=form, tried="show a picture of this PC", happened=f"shown as: {words}")
    assert reds == 0


LINKS = (
    "file:///etc/passwd",
    "FILE:///etc/passwd",
    "//evil.example/share/x",
    "smb://evil.example/share",
    "http://x.org",
    "mailto:a@x.org",
    "javascript:alert(1)",
    "data:text/html,x",
    "ms-settings:privacy",
    "/etc/passwd",
    "https://user:password@x.org/",
    "https:///etc/passwd",
)


@pytest.mark.parametrize("link", LINKS)
def test_only_links_to_web_pages_open(
    busy: Stage,  # noqa: F811
    opened: Opened,
    link: str,
    attack: Attack,
) -> None:
    view = busy.window.artifacts.details.card
    busy.window.artifacts.details.show_card(f"words [press here](<{link}>) words\n\n<{link}>")
    click_everywhere(view)
    attack(given=f"a card with a link to {link}", tried="click it", happened=str(opened.addresses))
    assert opened.addresses == []
    assert "press here" in view.toPlainText()


def test_a_link_to_a_web_page_opens_in_the_browser(
    busy: Stage,  # noqa: F811
    opened: Opened,
) -> None:
    view = busy.window.artifacts.details.card
    busy.window.artifacts.details.show_card("words [press](https://huggingface.co/x) words")
    click_everywhere(view)
    assert opened.addresses == ["https://huggingface.co/x"]


HEAVY = {
    "a long list": "- a\n" * 50_000,
    "a wide table": "|" + "a|" * 300 + "\n|" + "-|" * 300 + "\n" + ("|" + "a|" * 300 + "\n") * 200,
    "a table of a billion columns": "<table><tr><td colspan=2000000000>x</td></tr></table>",
    "deep quotes": ">" * 100_000 + "x",
    "many brackets": "[" * 200_000,
    "many stars": "*a " * 100_000,
    "one long word": "_a" * 200_000,
    "many pictures": "![a](b)" * 40_000,
}


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_card_does_not_hold_up_the_window(
    busy: Stage,  # noqa: F811
    name: str,
    attack: Attack,
) -> None:
    start = time.monotonic()
    details = busy.window.artifacts.details
    details.show_card(HEAVY[name])
    details.card.resize(600, 400)
    details.card.grab()
    took_s = time.monotonic() - start
    attack(given=f"a card with {name}", tried="show it", happened=f"shown in {took_s:.1f} s")
    assert took_s < 5


def test_an_answer_of_a_model_is_never_markup(theme, tmp_path: Path) -> None:  # noqa: F811
    file = tmp_path / "x.png"
    view = Transcript(theme, "chat")
    view.exchanges.append(Exchange("<img src=x>", text=f"<img src='{file.as_uri()}'>", figures="1"))
    view.draw()
    assert f"<img src='{file.as_uri()}'>" in view.toPlainText()


@pytest.mark.parametrize("kind", ["pipe", "device", "link", "giant"])
def test_a_card_that_is_no_plain_file_of_the_folder_is_none(
    tmp_path: Path, kind: str, attack: Attack
) -> None:
    folder, card = tmp_path / "model", tmp_path / "model" / "README.md"
    folder.mkdir()
    (tmp_path / "letter.txt").write_text("a private letter")
    if kind == "pipe":
        os.mkfifo(card)
    elif kind == "giant":
        with card.open("wb") as file:
            file.truncate(1 << 33)
    else:
        card.symlink_to("/dev/zero" if kind == "device" else tmp_path / "letter.txt")
    found = subprocess.run(
        [sys.executable, "-c", READ, str(folder)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    attack(given=f"a README.md that is a {kind}", tried="read the card", happened=found.stdout)
    assert found.stdout == "''\n"


READ = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from tests.hostile.test_cards import card_of
print(repr(card_of(sys.argv[1])))
"""


def card_of(folder: str) -> str:
    """Return the card of an artifact with one copy in a folder."""
    copy = ArtifactCopy(kind="folder", place=folder, made_s=1.0)
    artifact = ArtifactSnapshot(
        name="a", version=1, format="merged", size_bytes=1, created_s=1.0, copies=(copy,)
    )
    return read_card(artifact)
