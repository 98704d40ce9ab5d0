"""A folded part of a form shows what it says, and leaves nothing behind when its dialog closes."""

import sys

import pytest
import shiboken6
from PySide6.QtWidgets import QLabel

from app.gui.kit.collapsible import CollapsibleSection
from app.gui.kit.theme import Theme


def test_the_head_opens_and_closes_the_body(theme: Theme) -> None:
    body = QLabel("inside")
    fold = CollapsibleSection(theme, "More", body)
    assert body.isHidden()
    fold.head.click()
    assert fold.is_open()
    assert not body.isHidden()
    theme.changed.emit()
    assert not body.isHidden()


def test_another_look_after_the_end_harms_nobody(
    theme: Theme, monkeypatch: pytest.MonkeyPatch
) -> None:
    crashes: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *told: crashes.append(told))
    fold = CollapsibleSection(theme, "More", QLabel("inside"))
    shiboken6.delete(fold)
    theme.changed.emit()
    assert crashes == []
