"""One QApplication and theme for all tests of the window, and a stage per test."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

from app.gui.application import make_application
from app.gui.kit.theme import Theme
from app.gui.session.garbage_collector import MainThreadCollector, collect_if_due
from tests.fakes.core import FakeCore, busy_core
from tests.gui.stage import Stage

MakeStage = Callable[..., Stage]


@pytest.fixture(scope="session")
def application() -> QApplication:
    return make_application()


@pytest.fixture(autouse=True)
def garbage(application: QApplication) -> Iterator[MainThreadCollector]:
    """Let garbage be collected as in the app, and give the collector back after the test."""
    collection = MainThreadCollector()
    yield collection
    collect_if_due()
    collection.end()
    assert gc.isenabled(), "a bridge was not joined"


@pytest.fixture(scope="session")
def theme(application: QApplication) -> Theme:
    theme = Theme(application)
    theme.choose(Qt.ColorScheme.Light)
    return theme


@pytest.fixture
def make_stage(application: QApplication, theme: Theme) -> Iterator[MakeStage]:
    """Return what makes a stage; all of them end with the test, and none may have crashed."""
    stages: list[Stage] = []

    def make(core: FakeCore, **values: Any) -> Stage:
        stages.append(Stage(application, theme, core, **values))
        return stages[-1]

    yield make
    for stage in stages:
        stage.end()
    assert [text for stage in stages for text in stage.crashes] == []


@pytest.fixture
def busy(make_stage: MakeStage, tmp_path: Path) -> Stage:
    """Return the window over a cluster at work."""
    return make_stage(busy_core(tmp_path))


@pytest.fixture
def empty(make_stage: MakeStage, tmp_path: Path) -> Stage:
    """Return the window as a person sees it the first time."""
    return make_stage(FakeCore(log_folder=tmp_path))
