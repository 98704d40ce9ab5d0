"""Questions about a PC to add: how it is reached, its address, key file and name."""

from __future__ import annotations

import sys

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QVBoxLayout,
    QWidget,
)

from app.flows.add_node import NodeAnswers, NodeReview, Way, review
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_label, make_separator, set_style_property
from app.gui.session.context import Context

IS_WINDOWS = sys.platform == "win32"


class AddNodeForm(QWidget):
    edited = Signal()
    """The user has changed an answer."""
    find_wanted = Signal()
    list_wanted = Signal()
    windows_wanted = Signal()

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._was_edited = False
        self.over_ssh = QRadioButton("Another PC, over SSH")
        self.this_pc = QRadioButton("This PC")
        self.in_wsl = QRadioButton("This PC, in WSL")
        self.distro = ChoiceBox()
        self.distro.setAccessibleName("WSL distro")
        self.over_ssh.setChecked(True)
        self.target, self.key, self.name = QLineEdit(), QLineEdit(), QLineEdit()
        self.target.setPlaceholderText("anna@192.168.1.20, or anna@gamer-pc:2222")
        self.key.setPlaceholderText("Default: your SSH agent and the keys in ~/.ssh")
        self.problems = {
            key: make_label(role="problem", wraps=True) for key in ("target", "distro", "name")
        }
        self._ssh_part = self._make_ssh_part()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(make_label("Which PC?", "heading"))
        for widget in (self.over_ssh, self.this_pc, self.in_wsl, self.distro):
            column.addWidget(widget)
        column.addWidget(self.problems["distro"])
        column.addWidget(make_separator())
        column.addWidget(self._ssh_part)
        column.addWidget(make_label("Name", "subheading"))
        column.addWidget(self.name)
        column.addWidget(self.problems["name"])
        column.addWidget(make_label("Name shown in lists and run files.", "caption"))
        for line in (self.target, self.key, self.name):
            # `textEdited`, not `textChanged`: clearing the fields from code is no edit.
            line.textEdited.connect(lambda text: self._change())
        for choice in (self.this_pc, self.in_wsl):
            choice.toggled.connect(lambda checked: self._change())
        self.distro.activated.connect(lambda place: self._change())
        # Until the answer arrives, and after an error, this PC counts as one without WSL.
        self.show_distros(())

    def choose_this_pc(self) -> None:
        (self.in_wsl if IS_WINDOWS else self.this_pc).setChecked(True)

    def show_distros(self, names: tuple[str, ...]) -> None:
        """Offer the WSL distros of this PC; Windows itself cannot train."""
        self.distro.clear()
        self.distro.addItems(names)
        self.in_wsl.setVisible(bool(names) or IS_WINDOWS)
        self.this_pc.setVisible(not IS_WINDOWS)

    def review(self) -> NodeReview:
        """Check the answers, and show the problems that they have."""
        way: Way = "local" if self.this_pc.isChecked() else "ssh"
        if self.in_wsl.isChecked():
            way = "wsl"
        answers = NodeAnswers(
            way=way,
            target=self.target.text(),
            distro=self.distro.currentText(),
            name=self.name.text(),
        )
        result = review(answers, tuple(self._context.cluster.nodes))
        self._show_review(result)
        return result

    def clear(self) -> None:
        """Ask about the next PC."""
        for line in (self.target, self.name):
            line.clear()
        self._was_edited = False
        self.over_ssh.setChecked(True)
        self.target.setFocus()

    def fill(self, target: str) -> None:
        """Answer with an address that was found."""
        self.target.setText(target)
        self._change()

    def set_busy(self, is_busy: bool) -> None:
        asked = (self.target, self.key, self.name, self.distro)
        for widget in (*asked, *self._buttons, self.over_ssh, self.this_pc, self.in_wsl):
            widget.setEnabled(not is_busy)

    # ------------------------------------------------------------ inside

    def _make_ssh_part(self) -> QWidget:
        part = QWidget()
        column = QVBoxLayout(part)
        column.setContentsMargins(0, 0, 0, 8)
        column.setSpacing(4)
        self.target.setAccessibleName("Address")
        self.key.setAccessibleName("Key file")
        self.name.setAccessibleName("Name")
        column.addWidget(make_label("Address", "subheading"))
        column.addWidget(self.target)
        column.addWidget(self.problems["target"])
        column.addWidget(
            make_label(
                "User and host, or a name of ~/.ssh/config, as after 'ssh'. The PC needs an SSH "
                "server and python3; Rackless installs the rest.",
                "caption",
                wraps=True,
            )
        )
        ways = QGridLayout()
        self._buttons: list[Button] = []
        for place, (words, wanted, icon) in enumerate(
            (
                ("Find PCs on this network", self.find_wanted, "search"),
                ("Add a list of PCs", self.list_wanted, "add"),
                ("Script for a Windows PC", self.windows_wanted, "save"),
            )
        ):
            button = Button(self._context.theme, words, wanted.emit, icon=icon, role="link")
            ways.addWidget(button, place // 2, place % 2, Qt.AlignmentFlag.AlignLeft)
            self._buttons.append(button)
        ways.setColumnStretch(1, 1)
        column.addLayout(ways)
        column.addSpacing(8)
        column.addWidget(make_label("Key file", "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.key, 1)
        browse = Button(self._context.theme, "Choose\u2026", self._choose_key, icon="folder")
        row.addWidget(browse)
        self._buttons.append(browse)
        column.addLayout(row)
        return part

    def _change(self) -> None:
        self._was_edited = True
        self.edited.emit()

    def _show_review(self, result: NodeReview) -> None:
        self._ssh_part.setVisible(self.over_ssh.isChecked())
        self.distro.setVisible(self.in_wsl.isChecked())
        # The name that the node gets if this field stays empty.
        self.name.setPlaceholderText(result.name)
        # An empty field is not an error before the user has typed anything.
        is_blank = self.over_ssh.isChecked() and not self.target.text().strip()
        asked = {"target": self.target, "distro": self.distro, "name": self.name}
        for key, label in self.problems.items():
            text = result.problems.get(key, "")
            if key == "target" and (is_blank or not self._was_edited):
                text = ""
            label.setText(text)
            label.setVisible(bool(text))
            set_style_property(asked[key], "bad", bool(text))

    def _choose_key(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Private key file")
        if chosen:
            self.key.setText(chosen)
            self._change()
