"""Add a PC: ask for its address, confirm its fingerprint, show its hardware.

A host key that has changed since it was confirmed is a hard stop, not a question.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QTimer
from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QLineEdit,
    QRadioButton,
    QStackedLayout,
    QVBoxLayout,
    QWidget,
)

from app.errors import HostKeyChanged, HostKeyUnknown, RacklessError
from app.events import NodeSnapshot
from app.flows.add_node import NodeAnswers, NodeReview, Way, review
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_label, make_separator, set_style_property
from app.gui.nodes.node_found import NodeFound
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.nodes.node import NodeAddress, SshAddress

IS_WINDOWS = sys.platform == "win32"
FINGERPRINT_COMMAND = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"


class AddNodeDialog(QDialog):
    """Adds a node in three steps: address, fingerprint, found hardware with environment setup."""

    def __init__(self, context: Context, parent: QWidget) -> None:
        super().__init__(parent)
        self._context = context
        self._op: Op | None = None
        self._fingerprint = ""
        self._was_edited = False
        self.setWindowTitle("Add a PC")
        self.setMinimumWidth(560)
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
        self.banner = Banner(context.theme, can_close=False)
        self.add = Button(context.theme, "Add", self._add, role="primary")
        self.confirm = Button(context.theme, "Fingerprint matches, add", self._add, role="primary")
        self._cancel = Button(context.theme, "Cancel", self.reject)
        self._ssh_part = self._make_ssh_part()
        self.found = NodeFound(context)
        self._asking = QWidget()
        self.pages = QStackedLayout(self)
        for page in (self._asking, self.found):
            self.pages.addWidget(page)
        column = QVBoxLayout(self._asking)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(8)
        column.addWidget(make_label("Which PC?", "heading"))
        column.addWidget(self.over_ssh)
        column.addWidget(self.this_pc)
        column.addWidget(self.in_wsl)
        column.addWidget(self.distro)
        column.addWidget(self.problems["distro"])
        column.addWidget(make_separator())
        column.addWidget(self._ssh_part)
        column.addWidget(make_label("Name", "subheading"))
        column.addWidget(self.name)
        column.addWidget(self.problems["name"])
        column.addWidget(make_label("Name shown in lists and run files.", "caption"))
        column.addSpacing(8)
        column.addWidget(self.banner)
        column.addStretch(1)
        column.addLayout(self._make_foot())
        for line in (self.target, self.key, self.name):
            # `textEdited`, not `textChanged`: clearing the fields from code is no edit.
            line.textEdited.connect(lambda text: self._edited())
        for choice in (self.this_pc, self.in_wsl):
            choice.toggled.connect(lambda checked: self._edited())
        self.distro.activated.connect(lambda place: self._edited())
        self.found.done.connect(self.accept)
        self.found.another_wanted.connect(self._begin_again)
        # Deferred by one turn: the layout has its new height only after this event.
        self.found.changed.connect(lambda: QTimer.singleShot(0, self, self._fit))
        # Until the answer arrives, and if it is an error, this PC counts as one without WSL.
        self._show_distros(())
        context.bridge.run(
            lambda core, report: core.nodes.wsl_distros(), self._show_distros, lambda error: None
        )
        self.finished.connect(lambda code: self._op.cancel() if self._op else None)
        self._ask_again()

    def choose_this_pc(self) -> None:
        (self.in_wsl if IS_WINDOWS else self.this_pc).setChecked(True)

    def _show_distros(self, names: tuple[str, ...]) -> None:
        """Offer the WSL distros of this PC; Windows itself cannot train."""
        self.distro.clear()
        self.distro.addItems(names)
        self.in_wsl.setVisible(bool(names) or IS_WINDOWS)
        self.this_pc.setVisible(not IS_WINDOWS)
        self._ask_again()

    # ------------------------------------------------------------ layout

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
                "User and host, as you would type them after 'ssh'. The PC needs an SSH server "
                "and python3; Rackless installs the rest.",
                "caption",
                wraps=True,
            )
        )
        column.addSpacing(8)
        column.addWidget(make_label("Key file", "subheading"))
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.key, 1)
        browse = Button(self._context.theme, "Choose\u2026", self._choose_key, icon="folder")
        row.addWidget(browse)
        column.addLayout(row)
        return part

    def _make_foot(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        row.addWidget(self._cancel)
        row.addWidget(self.add)
        row.addWidget(self.confirm)
        # Enter adds, as in any dialog with one field to fill in.
        self.add.setDefault(True)
        return row

    def _fit(self) -> None:
        """Grow the dialog to fit its content; it never shrinks under the pointer."""
        page = self.pages.currentWidget()
        layout = page.layout() if page is not None else None
        if layout is not None:
            layout.activate()
            needed = layout.totalHeightForWidth(self.width())
            self.resize(self.width(), max(self.height(), needed))

    # ------------------------------------------------------------ answers

    def _review(self) -> NodeReview:
        way: Way = "local" if self.this_pc.isChecked() else "ssh"
        if self.in_wsl.isChecked():
            way = "wsl"
        answers = NodeAnswers(
            way=way,
            target=self.target.text(),
            distro=self.distro.currentText(),
            name=self.name.text(),
        )
        return review(answers, tuple(self._context.cluster.nodes))

    def _edited(self) -> None:
        # A confirmed fingerprint belongs to one address, so `_ask_again` drops it at any edit.
        self._was_edited = True
        self.banner.hide()
        self._ask_again()

    def _ask_again(self) -> None:
        self._fingerprint = ""
        self.confirm.hide()
        self.add.show()
        self._ssh_part.setVisible(self.over_ssh.isChecked())
        self.distro.setVisible(self.in_wsl.isChecked())
        result = self._review()
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
        self.add.setEnabled(result.address is not None)
        QTimer.singleShot(0, self, self._fit)

    def _address(self) -> NodeAddress | None:
        address = self._review().address
        # An empty key field means the SSH agent and the default keys.
        if isinstance(address, SshAddress) and self.key.text().strip():
            return replace(address, key=Path(self.key.text().strip()))
        return address

    def _choose_key(self) -> None:
        chosen, _ = QFileDialog.getOpenFileName(self, "Private key file")
        if chosen:
            self.key.setText(chosen)
            self._edited()

    # ------------------------------------------------------------ adding

    def _add(self) -> None:
        address, name = self._address(), self._review().name
        if address is None:
            return
        accepted = self._fingerprint or None
        self._set_busy(True)
        self.banner.show_message(
            "busy", f"Connecting to {address}", "Logging in and sending the agent (0.1 MB)."
        )
        self._op = self._context.bridge.run(
            lambda core, report: core.nodes.add(name, address, accepted), self._added, self._failed
        )

    def _set_busy(self, is_busy: bool) -> None:
        # Cancel stays enabled: a connection may take until its timeout to fail.
        for widget in (
            self.add,
            self.confirm,
            self.target,
            self.key,
            self.name,
            self.over_ssh,
            self.this_pc,
            self.in_wsl,
            self.distro,
        ):
            widget.setEnabled(not is_busy)

    def _added(self, node: NodeSnapshot) -> None:
        self.setWindowTitle(f"{node.name} added")
        self.pages.setCurrentIndex(1)
        self.found.show_node(node)

    def _begin_again(self) -> None:
        self._set_busy(False)
        for line in (self.target, self.name):
            line.clear()
        self._was_edited = False
        self.banner.hide()
        self.setWindowTitle("Add a PC")
        self.pages.setCurrentIndex(0)
        self.over_ssh.setChecked(True)
        self._ask_again()
        self.target.setFocus()

    def _failed(self, error: RacklessError) -> None:
        self._set_busy(False)
        # First contact: show the fingerprint and ask. It is sent with the next attempt only.
        if isinstance(error, HostKeyUnknown):
            self._fingerprint = error.fingerprint
            self.banner.show_message(
                "warning",
                f"Is this the fingerprint of {error.host}?\n{error.fingerprint}",
                "This PC has not connected to it before. Compare with the output of this command "
                "on that PC:\n"
                f"{FINGERPRINT_COMMAND}",
            )
            self.add.hide()
            self.confirm.show()
            self.confirm.setFocus()
            QTimer.singleShot(0, self, self._fit)
            return
        self._fingerprint = ""
        self.confirm.hide()
        self.add.show()
        # A changed key may be an attack, so there is no button to accept it here.
        self.add.setEnabled(not isinstance(error, HostKeyChanged))
        self.banner.show_error(error)
        QTimer.singleShot(0, self, self._fit)
