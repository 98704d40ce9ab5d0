"""Push an artifact to the Hugging Face hub: its name there, and whether it is private."""

from __future__ import annotations

from PySide6.QtWidgets import QCheckBox, QDialog, QLineEdit, QVBoxLayout, QWidget

from app.artifact import ArtifactSnapshot
from app.gui.kit.primitives import Button, make_dialog_buttons, make_label
from app.gui.kit.theme import Theme
from app.hub.hub import is_hub_id
from app.text import show_bytes

WIDTH_PX = 540
HOW = "Use NAME/MODEL, such as anna/poems-awq, with only letters, digits and . - _"


class PushDialog(QDialog):
    """Asks for name and visibility; the token is the one that the hub's own tools store."""

    def __init__(self, theme: Theme, parent: QWidget, artifact: ArtifactSnapshot) -> None:
        super().__init__(parent)
        self.setWindowTitle(f"Push {artifact.label}")
        self.resize(WIDTH_PX, 0)
        self.hub_id = QLineEdit()
        self.hub_id.setAccessibleName("Name on the hub")
        self.hub_id.setPlaceholderText(f"your-name/{artifact.name}")
        self.private = QCheckBox("Private: only you can see it")
        # Private by default: making a model public later is easy, taking it back is not.
        self.private.setChecked(True)
        self.start = Button(theme, "Push", self.accept, icon="export", role="primary")
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(8)
        column.addWidget(make_label("Name on the Hugging Face hub", "heading"))
        column.addWidget(self.hub_id)
        self._problem = make_label(role="problem", wraps=True)
        column.addWidget(self._problem)
        column.addWidget(self.private)
        column.addSpacing(4)
        words = (
            f"Uploads {show_bytes(artifact.size_bytes)} from this PC, including the card. Uses "
            "your Hugging Face token (from Settings or hf auth login), which needs write access."
        )
        label = make_label(words, "muted", wraps=True)
        column.addWidget(label)
        column.addSpacing(8)
        column.addLayout(make_dialog_buttons(theme, self, self.start))
        self.hub_id.textChanged.connect(self._review)
        self._review()

    def name(self) -> str:
        """Return the hub id as entered."""
        return self.hub_id.text().strip()

    def _review(self) -> None:
        is_good = is_hub_id(self.name())
        owner, _, model = self.name().partition("/")
        # No complaint while the owner's name is still being typed.
        is_typed = bool(model) or not owner
        self.start.setEnabled(is_good)
        self._problem.setText(HOW)
        self._problem.setVisible(bool(self.name()) and is_typed and not is_good)
