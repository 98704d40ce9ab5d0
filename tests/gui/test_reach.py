"""Every page, dialog and step is usable by keyboard, by screen reader and by weak eyes."""

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QWidget

from tests.gui.contrast import find_faint
from tests.gui.pictures import BUSY, EMPTY, make_stage_of
from tests.gui.reach import find_unnamed, find_unreached


@pytest.mark.parametrize("name", [*BUSY, *EMPTY])
def test_tab_reaches_all_and_all_is_named_and_readable(name, application, theme, tmp_path):
    stage, shown = make_stage_of(application, theme, name, tmp_path)
    palette = stage.window.findChild(QWidget, "palette")
    root = palette if palette is not None and palette.isVisible() else shown
    complaints = [*find_unnamed(root), *find_unreached(root), *find_faint(root)]
    theme.choose(Qt.ColorScheme.Dark)
    complaints += find_faint(root)
    if shown is not stage.window:
        shown.close()
    stage.end()
    theme.choose(Qt.ColorScheme.Light)  # last: it is slow while there are widgets to follow it
    assert complaints == []
