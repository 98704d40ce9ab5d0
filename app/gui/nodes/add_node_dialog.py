"""Add a PC: ask for its address, confirm its fingerprint, show its hardware.

A host key that has changed since it was confirmed is a hard stop, not a question.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from PySide6.QtCore import Qt, QTimer
from PySide6.QtGui import QKeyEvent
from PySide6.QtWidgets import QDialog, QHBoxLayout, QLineEdit, QStackedLayout, QVBoxLayout, QWidget

from app.core.action import CoreApi
from app.core.new_nodes import AddNode, CopyKey, ResolveHost
from app.core.nodes import ListDistros
from app.errors import HostKeyChanged, HostKeyUnknown, LoginRefused, RacklessError, RunsPrograms
from app.events import NodeSnapshot
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button
from app.gui.nodes.add_node_form import AddNodeForm
from app.gui.nodes.found_pcs import FoundPcs
from app.gui.nodes.node_found import NodeFound
from app.gui.nodes.node_list_pane import NodeListPane
from app.gui.repairs.windows_script_dialog import WindowsScriptDialog
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.nodes.node import NodeAddress, SshTarget

if TYPE_CHECKING:
    from app.nodes.key_copy import CopiedKey

FINGERPRINT_COMMAND = "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"

TABLE_WIDTH_PX, LIST_WIDTH_PX = 680, 860
"""Widths at which the tables of found PCs and of a list show what has to be read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeToAdd:
    """Node to add, with what the user has confirmed so far."""

    name: str
    address: NodeAddress | SshTarget
    target: str
    """Address over SSH as it was typed."""
    key: str
    """Private key file; empty: those of ~/.ssh/config, else the default ones."""
    fingerprint: str | None
    agreed: tuple[str, ...]
    """Commands of ~/.ssh/config that may run."""
    password: str = field(default="", repr=False)
    """Password to install this PC's key with, first; empty: no key is installed."""


async def add_node(
    core: CoreApi, request: NodeToAdd, report: Callable[[CopiedKey], None]
) -> NodeSnapshot:
    """Add a node; over SSH at the address that ~/.ssh/config gives it.

    `report` gets the key that was copied there with a password.
    """
    address, fingerprint = request.address, request.fingerprint
    if isinstance(address, SshTarget):
        key = Path(request.key) if request.key else None
        address = (
            await core.do(ResolveHost(target=request.target, key=key, agreed=request.agreed))
        ).address
        if request.password:
            copied = await core.do(
                CopyKey(address=address, password=request.password, accept_host_key=fingerprint)
            )
            report(copied)
            # The fingerprint is stored by now; the next host on the way has its own.
            address, fingerprint = copied.address, None
    return await core.do(AddNode(name=request.name, address=address, accept_host_key=fingerprint))


class AddNodeDialog(QDialog):
    """Adds a node in three steps: address, fingerprint, found hardware with environment setup."""

    def __init__(self, context: Context, parent: QWidget) -> None:
        super().__init__(parent)
        self._context = context
        self._op: Op | None = None
        self._fingerprint = ""
        self._agreed: list[str] = []
        self._command = ""
        self._copied: CopiedKey | None = None
        self.setWindowTitle("Add a PC")
        self.setMinimumWidth(560)
        self.form = AddNodeForm(context)
        self.banner = Banner(context.theme, can_close=False)
        self.add = Button(context.theme, "Add", self._add, role="primary")
        self.confirm = Button(context.theme, "Fingerprint matches, add", self._add, role="primary")
        self.allow = Button(context.theme, "Run it and add", self._allow, role="primary")
        self.copy_key = Button(context.theme, "Copy key and add", self._add, role="primary")
        self.password = QLineEdit()
        self.password.setEchoMode(QLineEdit.EchoMode.Password)
        self.password.setAccessibleName("Password")
        self.password.setPlaceholderText("Password on that PC; used once and not stored")
        self._cancel = Button(context.theme, "Cancel", self.reject)
        self.found = NodeFound(context)
        self._asking = QWidget()
        self.pages = QStackedLayout(self)
        self.near = FoundPcs(context)
        self.several = NodeListPane(context)
        for page in (self._asking, self.found, self.near, self.several):
            self.pages.addWidget(page)
        column = QVBoxLayout(self._asking)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(8)
        column.addWidget(self.form)
        column.addSpacing(8)
        column.addWidget(self.banner)
        column.addWidget(self.password)
        column.addStretch(1)
        column.addSpacing(8)
        column.addLayout(self._make_foot())
        self.form.edited.connect(self._edited)
        self.form.find_wanted.connect(self._find)
        self.form.list_wanted.connect(self._list)
        self.form.windows_wanted.connect(self._offer_script)
        for page in (self.near, self.several):
            page.back.connect(partial(self._turn_to, self._asking))
        self.near.used.connect(self._use)
        self.several.done.connect(self.accept)
        self.finished.connect(lambda code: self.several.stop())
        self.found.done.connect(self.accept)
        self.found.another_wanted.connect(self._begin_again)
        # Deferred by one turn: the layout has its new height only after this event.
        for page in (self.found, self.several):
            page.changed.connect(lambda: QTimer.singleShot(0, self, self._fit))
        context.bridge.do(ListDistros(), self._show_distros, lambda error: None)
        self.finished.connect(lambda code: self._op.cancel() if self._op else None)
        self._ask_again()
        self.form.target.setFocus()  # most users type an address

    def choose_this_pc(self) -> None:
        self.form.choose_this_pc()

    def _show_distros(self, names: tuple[str, ...]) -> None:
        self.form.show_distros(names)
        # The answer may arrive while a PC is being added, or its fingerprint compared.
        if self._op is None:
            self._ask_again()

    # ------------------------------------------------------------ layout

    def _make_foot(self) -> QHBoxLayout:
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addStretch(1)
        for button in (self._cancel, self.add, self.confirm, self.allow, self.copy_key):
            row.addWidget(button)
        # Enter adds, as in any dialog with one field to fill in.
        self.add.setDefault(True)
        return row

    def keyPressEvent(self, event: QKeyEvent) -> None:
        is_aside = self.pages.currentWidget() in (self.near, self.several)
        if event.key() == Qt.Key.Key_Escape and is_aside:
            self._turn_to(self._asking)  # as Back does
        else:
            super().keyPressEvent(event)

    def _turn_to(self, page: QWidget) -> None:
        self.pages.setCurrentWidget(page)
        if page is self._asking:
            self.form.target.setFocus()
        QTimer.singleShot(0, self, self._fit)

    def _list(self) -> None:
        self.resize(max(self.width(), LIST_WIDTH_PX), self.height())
        self._turn_to(self.several)

    def _offer_script(self) -> None:
        dialog = WindowsScriptDialog(self._context, self, self.form.review().name, is_new=True)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()

    def _find(self) -> None:
        self.resize(max(self.width(), TABLE_WIDTH_PX), self.height())
        self._turn_to(self.near)
        self.near.look()

    def _use(self, target: str) -> None:
        self.form.fill(target)
        self._turn_to(self._asking)

    def _fit(self) -> None:
        """Grow the dialog to fit its content; it never shrinks under the pointer."""
        page = self.pages.currentWidget()
        layout = page.layout() if page is not None else None
        if layout is not None:
            layout.activate()
            needed = layout.totalHeightForWidth(self.width())
            self.resize(self.width(), max(self.height(), needed))

    def _offer(self, wanted: Button) -> None:
        """Show one of the buttons that add."""
        for button in (self.add, self.confirm, self.allow, self.copy_key):
            button.setVisible(button is wanted)
        self.password.clear()
        self.password.setVisible(wanted is self.copy_key)
        wanted.setDefault(True)
        if wanted is self.copy_key:
            self.password.setFocus()
        elif wanted is not self.add:
            wanted.setFocus()
        QTimer.singleShot(0, self, self._fit)

    # ------------------------------------------------------------ answers

    def _edited(self) -> None:
        self.banner.hide()
        self._ask_again()

    def _ask_again(self) -> None:
        # A confirmation holds for one address, so any edit drops it.
        self._fingerprint = ""
        self._agreed.clear()
        self._offer(self.add)
        self.add.setEnabled(self.form.review().address is not None)

    # ------------------------------------------------------------ adding

    def _add(self) -> None:
        result = self.form.review()
        if result.address is None:
            return
        self._set_busy(True)
        self.banner.show_message(
            "busy",
            f"Connecting to {result.name}",
            "Logging in and sending the agent (0.1 MB).",
        )
        request = NodeToAdd(
            name=result.name,
            address=result.address,
            target=self.form.target.text(),
            key=self.form.key.text().strip(),
            fingerprint=self._fingerprint or None,
            agreed=tuple(self._agreed),
            password=self.password.text(),
        )
        self.password.clear()
        self._op = self._context.bridge.run(
            lambda core, report: add_node(core, request, report),
            self._added,
            self._failed,
            self._show_copied,
        )

    def _allow(self) -> None:
        self._agreed.append(self._command)
        self._add()

    def _set_busy(self, is_busy: bool) -> None:
        # Cancel stays enabled: a connection may take until its timeout to fail.
        if is_busy:
            self._cancel.setFocus()
        self.form.set_busy(is_busy)
        for widget in (self.add, self.confirm, self.allow, self.copy_key, self.password):
            widget.setEnabled(not is_busy)

    def _show_copied(self, copied: CopiedKey) -> None:
        self._copied = copied

    def _added(self, node: NodeSnapshot) -> None:
        self.setWindowTitle(f"{node.name} added")
        self.pages.setCurrentWidget(self.found)
        self.found.show_node(node, self._copied)

    def _begin_again(self) -> None:
        self._set_busy(False)
        self._copied = None
        self.form.clear()
        self.banner.hide()
        self.setWindowTitle("Add a PC")
        self.pages.setCurrentWidget(self._asking)
        self._ask_again()

    def _failed(self, error: RacklessError) -> None:
        self._set_busy(False)
        match error:
            case HostKeyUnknown():
                # First contact. The fingerprint is sent with the next attempt only.
                self._fingerprint = error.fingerprint
                self.banner.show_message(
                    "warning",
                    f"Is this the fingerprint of {error.host}?\n{error.fingerprint}",
                    "This PC has not connected to it before. Compare with the output of this "
                    f"command on that PC:\n{FINGERPRINT_COMMAND}",
                )
                self._offer(self.confirm)
            case RunsPrograms():
                self._command = error.command
                self.banner.show_message(
                    "warning",
                    f"Run this program to reach it?\n{error.command}",
                    "Your SSH configuration (~/.ssh/config) names it for this host. It runs on "
                    "this PC with your rights.",
                )
                self._offer(self.allow)
            case LoginRefused() if error.account:
                # The fingerprint stays: it was confirmed for the same attempt.
                self.banner.show_message(
                    "warning",
                    error.message,
                    f"With the password of {error.account}, Rackless adds your key to "
                    "~/.ssh/authorized_keys there, as ssh-copy-id does.",
                )
                self._offer(self.copy_key)
            case _:
                self._fingerprint = ""
                self._offer(self.add)
                self.form.target.setFocus()
                # A changed key may be an attack, so there is no button to accept it here.
                self.add.setEnabled(not isinstance(error, HostKeyChanged))
                self.banner.show_error(error)
