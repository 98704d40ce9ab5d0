"""Add many PCs at once from a pasted list, and compare their fingerprints in one table."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPlainTextEdit, QVBoxLayout, QWidget

from app.core.new_nodes import AddNodeList
from app.errors import RacklessError
from app.flows.node_list import LIST_FORM, NodeOutcome, parse_node_list, summarise_outcomes
from app.gui.kit.banner import Banner
from app.gui.kit.inputs import ChoiceBox
from app.gui.kit.primitives import Button, make_label
from app.gui.kit.theme import Theme
from app.gui.session.bridge import Op
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.telemetry.state import Status, Tone

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


_STATES: dict[str, tuple[Tone, str]] = {
    "added": ("good", "added"),
    "confirm": ("warning", "compare"),
    "failed": ("error", "not added"),
}


def _describe(outcome: NodeOutcome) -> Status:
    wants_password = outcome.state == "failed" and bool(outcome.account)
    return Status("warning", "password") if wants_password else Status(*_STATES[outcome.state])


def outcome_columns() -> list[Column[NodeOutcome]]:
    return [
        Column(
            title="State",
            text=lambda o: _describe(o).text,
            status=_describe,
            width_px=104,
        ),
        Column(title="Name", text=lambda o: o.line.name, width_px=100),
        Column(title="Address", text=lambda o: o.host or o.line.target, width_px=160),
        # A fingerprint has to be readable as a whole.
        Column(
            title="Fingerprint, or reason",
            text=lambda o: o.fingerprint or o.message,
            width_px=400,
            stretches=True,
        ),
    ]


class NodeListPane(QWidget):
    back = Signal()
    done = Signal()
    changed = Signal()
    """The content has changed its height."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context
        self._op: Op | None = None
        self._outcomes: dict[int, NodeOutcome] = {}
        self._accepted: dict[str, str] = {}
        """Fingerprints that were confirmed, by host; a login that succeeds stores them."""
        self.text = QPlainTextEdit()
        self.text.setAccessibleName("List of PCs")
        self.text.setPlaceholderText("big anna@192.168.1.20\ngamer-pc\nlab bob@10.0.0.5:2222")
        # Tab moves on to the next control, since a list needs no tabs.
        self.text.setTabChangesFocus(True)
        self.text.setMinimumHeight(110)
        # A line may hold several PCs, so its number alone is no key.
        self.model: RowsModel[NodeOutcome] = RowsModel(
            outcome_columns(), key=lambda o: (o.line.number, o.line.name)
        )
        self.table = TableView(context.theme, self.model, "Results")
        self.table.setMinimumHeight(150)
        self.reason = make_label(wraps=True)
        self.passwords = AccountPasswords(context.theme)
        self.banner = Banner(context.theme, can_close=False)
        self.add = Button(context.theme, "Add all", self._add, role="primary")
        self.confirm = Button(
            context.theme, "All fingerprints match, add", self._confirm, role="primary"
        )
        self.finish = Button(context.theme, "Done", self.done.emit)
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(Button(context.theme, "Back", self.back.emit))
        row.addStretch(1)
        for button in (self.finish, self.add, self.confirm):
            row.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(24, 20, 24, 20)
        column.setSpacing(12)
        column.addWidget(make_label("Add a list of PCs", "heading"))
        column.addWidget(
            make_label(f"Write {LIST_FORM}; # begins a comment.", "caption", wraps=True)
        )
        column.addWidget(self.text)
        column.addWidget(self.banner)
        column.addWidget(self.table, 1)
        column.addWidget(self.reason)
        column.addWidget(self.passwords)
        column.addLayout(row)
        self.text.textChanged.connect(self._begin_again)
        self.table.chosen.connect(self._show_reason)
        self.passwords.given.connect(self._let_in)
        self._begin_again()

    def stop(self) -> None:
        """Stop adding; PCs that were added stay."""
        if self._op is not None:
            self._op.cancel()

    def _begin_again(self) -> None:
        # Confirmations hold for the list that was typed, so an edit drops them.
        self._outcomes.clear()
        self._accepted.clear()
        self.banner.hide()
        self.table.hide()
        self.reason.hide()
        self.passwords.ask(())
        self.confirm.hide()
        self.add.show()
        self.add.setEnabled(bool(self.text.toPlainText().strip()))

    def _add(self) -> None:
        lines = parse_node_list(self.text.toPlainText(), self._context.cluster.nodes)
        self._start(
            {
                place: NodeOutcome(line=line, state="confirm", message="")
                for place, line in enumerate(lines)
            }
        )

    def _confirm(self) -> None:
        waiting = {p: o for p, o in self._outcomes.items() if o.state == "confirm"}
        self._accepted |= {o.host: o.fingerprint for o in waiting.values()}
        self._start(waiting)

    def _let_in(self, passwords: dict[str, str]) -> None:
        """Add the PCs again for whose accounts passwords were typed."""
        waiting = {p: o for p, o in self._outcomes.items() if o.account in passwords}
        self._start(waiting, passwords)

    def _start(
        self, waiting: dict[int, NodeOutcome], passwords: dict[str, str] | None = None
    ) -> None:
        """Add the lines, with the fingerprints that were confirmed for them."""
        lines, places = tuple(one.line for one in waiting.values()), tuple(waiting)
        accepted = dict(self._accepted)
        self._set_busy(True)
        self.banner.show_message("busy", "Connecting to the PCs")
        self._op = self._context.bridge.do(
            AddNodeList(lines=lines, accepted=accepted, passwords=passwords or {}),
            lambda found: self._show(dict(zip(places, found, strict=True))),
            self._show_failure,
        )

    def _show(self, found: dict[int, NodeOutcome]) -> None:
        self._set_busy(False)
        self._outcomes.update(found)
        outcomes = tuple(self._outcomes[place] for place in sorted(self._outcomes))
        self.model.reset(outcomes)
        self.table.show()
        failures = [o for o in outcomes if o.state == "failed"]
        if failures:
            self.table.select((failures[0].line.number, failures[0].line.name))
        waiting = any(o.state == "confirm" for o in outcomes)
        self.confirm.setVisible(waiting)
        accounts = tuple(dict.fromkeys(o.account for o in failures if o.account))
        # Fingerprints first, then passwords, as on the command line.
        self.passwords.ask(() if waiting else accounts)
        self.add.hide()
        if waiting:
            self.table.setFocus()  # where the fingerprints are
        elif not accounts:
            self.finish.setFocus()
        self.changed.emit()
        self.banner.show_message(
            "warning" if waiting or failures else "good",
            summarise_outcomes(outcomes),
            "Compare each with the output of this command on that PC:\n"
            "ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub"
            if waiting
            else "",
        )

    def _show_reason(self) -> None:
        """Show the whole message of the selected line."""
        one = self.table.selected()
        self.reason.setText(one.message if one is not None else "")
        self.reason.setVisible(bool(self.reason.text()))

    def _show_failure(self, error: RacklessError) -> None:
        self._set_busy(False)
        self.banner.show_error(error)

    def _set_busy(self, is_busy: bool) -> None:
        for widget in (self.text, self.add, self.confirm, self.passwords):
            widget.setEnabled(not is_busy)
