"""Ask for the passwords of accounts that refuse this PC's keys: one for all, or one each."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme

NUM_SHOWN = 26
"""Number of characters of an account that are shown, as of `anna@192.168.100.200:2222`."""


class AccountPasswords(QWidget):
    """A choice of accounts, a password for it, and a button; hidden while none is wanted."""

    given = Signal(dict)
    """Typed password by account; it is not stored."""

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self._accounts: tuple[str, ...] = ()
        self.account = ChoiceBox()
        self.account.setAccessibleName("Account")
        self.account.setMinimumContentsLength(NUM_SHOWN)
        self.password = QLineEdit()
        self.password.setEchoMode(QLineEdit.EchoMode.Password)
        self.password.setAccessibleName("Password")
        self.password.setPlaceholderText("Password there; not stored")
        self.copy_key = Button(theme, "Copy key and add", self._give, role="primary")
        self.copy_key.setEnabled(False)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.account)
        row.addWidget(self.password, 1)
        row.addWidget(self.copy_key)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(8)
        column.addWidget(
            make_label(
                "These accounts accept none of your keys. With the password, Rackless adds one to "
                "~/.ssh/authorized_keys there, as ssh-copy-id does.",
                "caption",
                wraps=True,
            )
        )
        column.addLayout(row)
        self.account.currentIndexChanged.connect(lambda place: self.password.clear())
        self.password.textChanged.connect(lambda text: self.copy_key.setEnabled(bool(text)))
        self.password.returnPressed.connect(self.copy_key.click)
        self.ask(())

    def ask(self, accounts: Sequence[str]) -> None:
        """Ask for the passwords of accounts; none: hide."""
        self._accounts = tuple(accounts)
        everyone = [f"All {len(accounts)} accounts"] if len(accounts) > 1 else []
        self.account.clear()
        self.account.addItems([*everyone, *accounts])
        self.password.clear()
        self.setVisible(bool(accounts))
        if accounts:
            self.password.setFocus()

    def _give(self) -> None:
        typed, place = self.password.text(), self.account.currentIndex()
        self.password.clear()
        if len(self._accounts) > 1:
            chosen = self._accounts if place == 0 else self._accounts[place - 1 : place]
        else:
            chosen = self._accounts
        self.given.emit(dict.fromkeys(chosen, typed))
