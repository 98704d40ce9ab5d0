"""Text and what else has a meaning stands out from its ground, in both themes (WCAG 2.2, AA)."""

import re

import numpy as np
import pytest
from PySide6.QtGui import QImage

from app.gui.charts.line import COLORS, PATTERNS, choose_style
from app.gui.kit.theme import RESOURCES, read_palette
from app.gui.new_run.plan_view import COLORS as MEMORY_COLORS
from app.gui.tables.view import MARK_PX, SPLIT_COLORS
from tests.gui.contrast import MEANING, TEXT, contrast, luminance, strongest

TONES = ("good", "warning", "error", "calm", "busy")
GROUNDS = ("window", "surface", "sunken", "hover", "selected")
STYLE = (RESOURCES / "themes" / "window.qss").read_text(encoding="ascii")

PAINTED = [
    *((tone, f"{tone}_tint") for tone in TONES),
    *(("text", f"{tone}_tint") for tone in TONES),
    *((tone, ground) for tone in TONES for ground in ("surface", "selected", "hover")),
    *((color, "surface") for color in COLORS),  # words of a readout with several lines
    ("on_accent", "accent"),
    ("muted", "surface"),
    ("text", "good_tint"),  # what a run learns
]
MEANINGFUL = [
    *((color, "surface") for color in {*COLORS, *SPLIT_COLORS, *MEMORY_COLORS, "chart_muted"}),
    *((color, "selected") for color in SPLIT_COLORS),
    *((color, "sunken") for color in MEMORY_COLORS),
    *((color, "chart_grid") for color in ("chart_memory", "accent", "chart_utilisation")),
    *(("border_strong", ground) for ground in ("window", "surface", "sunken")),
    *(("accent", ground) for ground in GROUNDS),
    *(("scroll", ground) for ground in ("window", "surface")),
    *((tone, "window") for tone in ("warning", "error")),  # the edge of a card
    ("error", "sunken"),
]


def pairs_of_style():
    """Return every (text, ground) of the style sheet; without a ground of its own, all of them."""
    pairs = set()
    for selector, rules in re.findall(r"([^{}]+)\{([^}]*)\}", STYLE):
        inks = re.findall(r"(?<![-\w])(?:selection-|placeholder-text-)?color:\s*\$(\w+)", rules)
        plain = re.findall(r"(?<![-\w])color:\s*\$(\w+)", rules)
        grounds = re.findall(r"(?<![-\w])background:\s*\$(\w+)", rules)
        chosen = re.findall(r"selection-background-color:\s*\$(\w+)", rules)
        selected = re.findall(r"selection-color:\s*\$(\w+)", rules)
        if selected and chosen:
            pairs.add((selected[0], chosen[0]))
        if "QFrame" in selector or not inks:
            continue
        for ink in plain:
            for ground in grounds or GROUNDS:
                if ink != "on_accent" or ground.startswith("accent"):
                    pairs.add((ink, ground))
    return sorted(pairs)


def test_the_style_sheet_is_read():
    pairs = pairs_of_style()
    assert ("on_accent", "accent") in pairs
    assert ("muted", "sunken") in pairs
    assert ("error", "window") in pairs
    assert len(pairs) > 20


@pytest.mark.parametrize("name", ["light", "dark"])
def test_all_text_is_readable(name):
    palette = read_palette(name)
    faint = [
        f"{text} on {ground}: {ratio:.2f}"
        for text, ground in {*pairs_of_style(), *PAINTED}
        if (ratio := contrast(getattr(palette, text), getattr(palette, ground))) < TEXT
    ]
    assert faint == []


@pytest.mark.parametrize("name", ["light", "dark"])
def test_glyphs_and_lines_that_mean_something_are_visible(name):
    palette = read_palette(name)
    faint = [
        f"{color} on {ground}: {ratio:.2f}"
        for color, ground in MEANINGFUL
        if (ratio := contrast(getattr(palette, color), getattr(palette, ground))) < MEANING
    ]
    assert faint == []


def test_contrast_is_that_of_the_standard():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)
    assert luminance("#ffffff") == pytest.approx(1)
    pixels = np.array([[255, 255, 255]] * 9 + [[119, 119, 119]], np.uint8)
    assert strongest(pixels) == pytest.approx(4.48, abs=0.01)


def test_curves_differ_by_their_dashes_too():
    looks = [choose_style(place) for place in range(16)]
    assert len(set(looks)) == 16
    assert len({pattern for _, pattern in looks[:4]}) == len(PATTERNS)


def test_a_selected_row_has_a_mark_beside_its_tint(busy, theme):
    busy.window.go_to("runs")
    table = busy.window.runs.table
    table.selectRow(1)
    busy.settle(0.05)
    image = table.viewport().grab().toImage().convertToFormat(QImage.Format.Format_RGB32)
    middle = table.visualRect(table.model().index(1, 0)).center().y()
    assert image.pixelColor(MARK_PX - 2, middle).name() == theme.palette.accent
    other = table.visualRect(table.model().index(0, 0)).center().y()
    assert image.pixelColor(MARK_PX - 2, other).name() == theme.palette.surface
