"""Plan of a run next to its form: whether it fits, where, how fast, and the alternatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from PySide6.QtCore import QRectF, QSize, Qt, Signal
from PySide6.QtGui import QPainter, QPaintEvent
from PySide6.QtWidgets import QGridLayout, QHBoxLayout, QLabel, QSizePolicy, QVBoxLayout, QWidget

from agents.contract.data import DataFinding
from app.gui.charts.layer_strip import LayerStrip
from app.gui.kit.collapsible import CollapsibleSection
from app.gui.kit.primitives import make_label, set_tooltip
from app.gui.kit.theme import Theme
from app.gui.new_run.plan_notes import AdviceLines, Notes
from app.planning.candidate import Advice, GpuPlan, Plan
from app.planning.upgrades import Upgrades
from app.presentation import model_text, plan_text
from app.presentation.data_text import describe_first_rows
from app.presentation.stage_text import StageRow, list_planned_stages
from app.text import capitalize, count_of, short_card, show_bytes, show_rate, show_share

HEIGHT_PX = 12
COLORS = ("chart_utilisation", "chart_memory", "chart_tokens", "chart_temperature", "chart_muted")
"""Colours of the memory groups, in their order."""


class MemoryBar(QWidget):
    """Stacked bar of memory groups."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self._parts: tuple[tuple[str, int], ...] = ()
        self._room_bytes = 0
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        theme.changed.connect(self.update)

    def sizeHint(self) -> QSize:
        return QSize(120, HEIGHT_PX)

    def show_parts(self, parts: Sequence[tuple[str, int]], room_bytes: int) -> None:
        """Show groups of bytes against the available memory; any excess is painted in the error
        colour.

        Args:
            parts: name and size in bytes of each group; at most one per colour.
            room_bytes: available memory, in bytes.
        """
        self._parts, self._room_bytes = tuple(parts), room_bytes
        words = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts if size)
        set_tooltip(self, words)
        # A painted bar says nothing to a screen reader.
        self.setAccessibleName(f"{words}; available {show_bytes(room_bytes)}")
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        used = sum(size for _, size in self._parts)
        # Scale to what is larger, so that an overflow shows as red beyond the end of the memory.
        whole = max(used, self._room_bytes, 1)
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        palette = self._theme.palette
        area = QRectF(self.rect())
        painter.setBrush(palette.color("sunken"))
        painter.drawRoundedRect(area, 3, 3)
        left = 0.0
        for (_, size), color in zip(self._parts, COLORS, strict=False):
            width = area.width() * size / whole
            # a gap separates neighbours for people who cannot tell their colours apart
            seen = width - 1 if width > 3 else width
            painter.fillRect(QRectF(left, 0, seen, area.height()), palette.color(color))
            left += width
        if used > self._room_bytes:
            edge = area.width() * self._room_bytes / whole
            beyond = QRectF(edge, 0, area.width() - edge, area.height())
            painter.fillRect(beyond, palette.color("error"))
        painter.end()


class Swatch(QWidget):
    """Small square in the colour of a group, for the legend."""

    def __init__(self, theme: Theme, color: str) -> None:
        super().__init__()
        self._theme, self._color = theme, color
        self.setFixedSize(8, 8)
        theme.changed.connect(self.update)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self._theme.palette.color(self._color))
        painter.end()


MAX_ALTERNATIVES = 8
MAX_PURCHASES = 6
NUM_PURCHASE_NOTES = 2
"""Number of notes that are about purchases; those after them are the plan's own assumptions."""
_LEGEND_COLUMNS = 3
_DATA = "Data, by its first rows"


class PlanView(QWidget):
    """Shows a plan until the next one arrives, so that typing does not make it flicker."""

    advised = Signal(object)
    """Dotted run file keys and new values of the advice that the user applies."""
    purchases_wanted = Signal()
    """The user opened the section about what to buy."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._theme = theme
        self.headline = make_label(wraps=True)
        self.problem = make_label(role="problem", wraps=True)
        self.data_problem = Notes(_DATA, role="problem")
        self.data_note = Notes(_DATA)
        self.parts_note = Notes(model_text.LEFT)
        self._more_adapters = AdviceLines(theme, self.advised.emit, role="caption")
        self.parts_note.add(self._more_adapters)
        self._figures = QGridLayout()
        self._figures.setHorizontalSpacing(12)
        self._figures.setVerticalSpacing(4)
        self._figures.setColumnStretch(1, 1)
        self._rows: list[tuple[QLabel, QLabel]] = []
        self._gpus: list[_GpuLine] = []
        self._gpu_column = QVBoxLayout()
        self._gpu_column.setSpacing(10)
        self._legend = _make_legend(theme)
        self._advice = AdviceLines(theme, self.advised.emit)
        self._other_text = make_label(role="caption", wraps=True)
        self.others = CollapsibleSection(theme, "Alternatives", self._other_text)
        self._assumed_text = make_label(role="caption", wraps=True)
        self.assumed = CollapsibleSection(theme, "Assumptions", self._assumed_text)
        self._purchase_text = make_label(role="caption", wraps=True)
        self.purchases = CollapsibleSection(theme, "What to buy", self._purchase_text)
        self.purchases.head.toggled.connect(self._ask_purchases)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(12)
        column.addWidget(self.headline)
        column.addWidget(self.problem)
        column.addWidget(self.data_problem)
        column.addLayout(self._figures)
        # Above the GPUs: what to do comes before the details, of which there may be many.
        column.addWidget(self._advice)
        column.addLayout(self._gpu_column)
        column.addWidget(self._legend)
        column.addWidget(self.data_note)
        column.addWidget(self.parts_note)
        column.addWidget(self.others)
        column.addWidget(self.purchases)
        column.addWidget(self.assumed)
        self.show_nothing("Choose a model to see its plan.")

    def show_nothing(self, words: str) -> None:
        """Show why there is no plan yet."""
        self.headline.setText(words)
        self.headline.setObjectName("muted")
        self._polish()
        self.problem.hide()
        self._show_rows([])
        self._show_gpus(())
        self._advice.show_advice(())
        self._show_data(())
        self.parts_note.hide()
        self.others.hide()
        self.purchases.hide()
        self.assumed.hide()

    def show_problem(self, message: str, hint: str) -> None:
        """Show why no plan can be made."""
        # `str.capitalize` would change the rest to lower case, such as the name of a model.
        self.show_nothing(f"{message[0].upper()}{message[1:]}.")
        self.problem.setText(hint)
        self.problem.setVisible(bool(hint))

    def show_plan(self, plan: Plan) -> None:
        """Show a plan; if nothing fits, show the nearest candidate."""
        fits = plan.chosen is not None
        shown = plan.chosen or (plan.others[0] if plan.others else None)
        self.headline.setObjectName("" if fits else "problem")
        self.headline.setText(plan_text.describe_plan(plan))
        self._polish()
        self.problem.hide()
        model = [("Model", model_text.describe_model(plan.model))] if plan.model is not None else []
        costs = plan_text.describe_candidate(shown) if shown is not None and fits else []
        self._show_rows([*model, *costs])
        stages = list_planned_stages(shown) if shown is not None else []
        self._show_gpus(shown.gpus if shown is not None else (), stages)
        warned = [Advice(text=text) for text in plan_text.describe_warnings(plan)]
        limits = model_text.describe_limits(plan.limits)
        self._advice.show_advice(
            [
                replace(one, text=plan_text.use_labels(one.text))
                for one in (*limits, *warned, *plan.advice)
            ]
        )
        self._show_data(plan.findings)
        self.parts_note.show_notes(model_text.describe_parts(plan.parts))
        self._more_adapters.show_advice(model_text.offer_adapters(plan.parts))
        # Without a plan that fits, the nearest candidate is shown above and is no alternative.
        others = plan.others if fits else plan.others[1:]
        ways = [plan_text.describe_other(one) for one in others[:MAX_ALTERNATIVES]]
        ways += [f"{capitalize(one.text)}." for one in plan.refused]
        self._other_text.setText(plan_text.use_labels("\n\n".join(ways)))
        self.others.setVisible(bool(ways))
        self.others.set_note(count_of(len(others) + len(plan.refused), "plan"))
        self.purchases.show()
        self._assumed_text.setText("\n\n".join(plan.assumptions))
        self.assumed.setVisible(bool(plan.assumptions))
        self.assumed.set_note(count_of(len(plan.assumptions), "assumption"))

    def close_purchases(self) -> None:
        """Collapse the section about what to buy, since the run has changed."""
        self.purchases.head.setChecked(False)
        self.purchases.set_note("")

    def show_purchases(self, found: Upgrades) -> None:
        """Show purchases for the run, the most speed for the price first."""
        best = found.best_places[:MAX_PURCHASES]
        lines = [plan_text.describe_upgrade(one, found.currency) for one in best]
        lines = lines or ["No single purchase makes this run faster."]
        lines += [f"{capitalize(note)}." for note in found.notes[:NUM_PURCHASE_NOTES]]
        self._purchase_text.setText("\n\n".join(lines))
        self.purchases.set_note(count_of(len(best), "purchase") if best else "")

    def show_no_purchases(self, message: str) -> None:
        """Show why purchases are not known."""
        self._purchase_text.setText(message)

    def _ask_purchases(self, is_open: bool) -> None:
        if is_open:
            self._purchase_text.setText("Planning purchases\u2026")
            self.purchases_wanted.emit()

    def _show_data(self, findings: Sequence[DataFinding]) -> None:
        refused = [one for one in findings if one.consequence == "refuse"]
        others = [one for one in findings if one.consequence != "refuse"]
        for notes, some in ((self.data_problem, refused), (self.data_note, others)):
            notes.show_notes(
                [f"{capitalize(name)}: {text}" for name, text in describe_first_rows(some)]
            )

    def _polish(self) -> None:
        # Qt applies a rule for a changed property only after the style is polished again.
        self.headline.style().unpolish(self.headline)
        self.headline.style().polish(self.headline)

    def _show_rows(self, rows: Sequence[tuple[str, str]]) -> None:
        # Labels are kept and hidden: plans follow typing, and making new ones would flicker.
        while len(self._rows) < len(rows):
            pair = make_label(role="caption"), make_label(wraps=True)
            for place, label in enumerate(pair):
                top = Qt.AlignmentFlag.AlignTop
                self._figures.addWidget(label, len(self._rows), place, alignment=top)
            self._rows.append(pair)
        for number, pair in enumerate(self._rows):
            for label, text in zip(
                pair, rows[number] if number < len(rows) else ("", ""), strict=True
            ):
                label.setText(text)
                label.setVisible(number < len(rows))

    def _show_gpus(self, gpus: Sequence[GpuPlan], stages: Sequence[StageRow] = ()) -> None:
        while len(self._gpus) < len(gpus):
            self._gpus.append(line := _GpuLine(self._theme))
            self._gpu_column.addWidget(line)
        parts: list[tuple[GpuPlan, StageRow | None]]
        parts = [(gpus[row.rank], row) for row in stages] or [(gpu, None) for gpu in gpus]
        on_node = Counter(gpu.node for gpu in gpus)
        for number, line in enumerate(self._gpus):
            line.setVisible(number < len(parts))
            if number < len(parts):
                gpu, stage = parts[number]
                line.show_gpu(gpu, stage, is_only=on_node[gpu.node] == 1)
        self._legend.setVisible(bool(gpus))


class _GpuLine(QWidget):
    """One GPU: name and share, memory bar, speed and execution setting."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._name = make_label(role="subheading", wraps=True)
        self._strip = LayerStrip(theme)
        self._bar = MemoryBar(theme)
        self._memory = make_label(role="caption", wraps=True)
        self._setting = make_label(role="caption", wraps=True)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        for part in (self._name, self._strip, self._bar, self._memory, self._setting):
            column.addWidget(part)

    def show_gpu(self, gpu: GpuPlan, stage: StageRow | None, *, is_only: bool) -> None:
        """Show the plan of one GPU, and its stage where it has not all layers.

        Args:
            gpu: its plan.
            stage: its stage; None: it has all layers.
            is_only: whether the plan uses no other GPU of its node.
        """
        self._strip.setVisible(stage is not None)
        if stage is not None:
            self._strip.show_stage(stage)
        share = "" if gpu.share >= 1 else f", {show_share(gpu.share)}"
        card, node = short_card(gpu.card), gpu.node if is_only else f"{gpu.node} {gpu.device}"
        pipeline = ""
        if stage is not None and stage.num_replicas > 1:
            pipeline = f", pipeline {stage.replica + 1}"
        self._name.setText(f"{node}: {card}{share}{pipeline}")
        self._bar.show_parts(plan_text.group_memory(gpu.memory.parts.items()), gpu.room_bytes)
        fits = "" if gpu.fits else "Does not fit: "
        self._memory.setText(f"{fits}{plan_text.describe_memory(gpu)}")
        rate = f"{show_rate(gpu.tokens_per_s)}, " if gpu.tokens_per_s else ""
        self._setting.setText(f"{rate}{plan_text.describe_setting(gpu)}")


def _make_legend(theme: Theme) -> QWidget:
    box = QWidget()
    grid = QGridLayout(box)
    grid.setContentsMargins(0, 0, 0, 0)
    grid.setHorizontalSpacing(12)
    grid.setVerticalSpacing(2)
    for number, (name, color) in enumerate(zip(plan_text.MEMORY_GROUPS, COLORS, strict=True)):
        row = QHBoxLayout()
        row.setSpacing(6)
        row.addWidget(Swatch(theme, color))
        row.addWidget(make_label(name, "caption"), 1)
        grid.addLayout(row, number // _LEGEND_COLUMNS, number % _LEGEND_COLUMNS)
    return box
