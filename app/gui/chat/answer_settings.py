"""Generation settings: system prompt, sampling and maximum length."""

from __future__ import annotations

from PySide6.QtWidgets import QGridLayout, QLineEdit, QWidget

from app.flows.chat import DEFAULT_MAX_TOKENS, ChatSettings
from app.gui.kit.inputs import DecimalBox, NumberBox
from app.gui.kit.primitives import make_label


class AnswerSettings(QWidget):
    """Generation settings, shared by all columns so that answers are comparable."""

    def __init__(self) -> None:
        super().__init__()
        self.system = QLineEdit()
        self.system.setPlaceholderText("None")
        self.max_tokens = NumberBox(minimum=1, maximum=8192, value=DEFAULT_MAX_TOKENS)
        # 0 by default: greedy answers are repeatable, so a difference comes from the models.
        self.temperature = DecimalBox(minimum=0, maximum=5, singleStep=0.1)
        self.top_p = DecimalBox(minimum=0.01, maximum=1, value=1, singleStep=0.05)
        grid = QGridLayout(self)
        grid.setContentsMargins(0, 0, 0, 0)
        grid.setHorizontalSpacing(16)
        for place, (name, help_text, widget) in enumerate(
            (
                ("System prompt", "Instructions for every conversation.", self.system),
                ("Max tokens", "Longer answers are cut.", self.max_tokens),
                ("Temperature", "0: always the most likely token.", self.temperature),
                ("Top-p", "Share of the probability to sample from.", self.top_p),
            )
        ):
            widget.setAccessibleName(name)
            grid.addWidget(make_label(name, "subheading"), 0, place)
            grid.addWidget(widget, 1, place)
            grid.addWidget(make_label(help_text, "caption"), 2, place)
            grid.setColumnStretch(place, 1 if place else 3)

    def settings(self) -> ChatSettings:
        """Return the chosen settings."""
        return ChatSettings(
            system=self.system.text(),
            max_tokens=self.max_tokens.value(),
            temperature=self.temperature.value(),
            top_p=self.top_p.value(),
        )
