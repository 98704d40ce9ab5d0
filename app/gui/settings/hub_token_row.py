"""Hugging Face token: save it, copy it to nodes, delete it. It is never displayed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QVBoxLayout, QWidget

from app.core import hub
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.kit.primitives import Button, make_label
from app.gui.session.context import Context
from app.hub.node_tokens import describe_tokens
from app.text import show_list

if TYPE_CHECKING:
    from app.core.action import CoreApi
    from app.hub.hub_token import TokenPlace
    from app.hub.node_tokens import NodeToken

_WORDS = {
    "none": "No token set. You need one for private or gated models and to push artifacts to the "
    "hub, but not for public models.",
    "kept": "A token is saved {where}. It gives access to private and gated models.",
    "keyring": "A token is saved {where}. It gives access to private and gated models.",
    "environment": (
        "A token is set by the environment variable HF_TOKEN, which overrides any saved token."
    ),
}


class HubTokenRow(QWidget):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self._bridge = context.bridge
        self.state = make_label("", "caption", wraps=True)
        self.banner = Banner(context.theme)
        self.field = QLineEdit()
        # A token is a password: it is never shown, not even the one just typed.
        self.field.setEchoMode(QLineEdit.EchoMode.Password)
        self.field.setPlaceholderText("hf_\u2026 from huggingface.co/settings/tokens")
        self.field.setAccessibleName("Hugging Face token")
        self.keep = Button(context.theme, "Verify and save", self._keep)
        self.forget = Button(context.theme, "Delete token", self._forget, role="danger")
        self.field.textChanged.connect(lambda text: self.keep.setEnabled(bool(text.strip())))
        self.field.returnPressed.connect(self._keep)
        self.keep.setEnabled(False)
        self.forget.hide()
        self.nodes = make_label("", "caption", wraps=True)
        self.give = Button(context.theme, "Copy to all nodes", self._give)
        self.take = Button(context.theme, "Delete from nodes", self._take)
        self._nodes_row = QWidget()
        nodes_row = QHBoxLayout(self._nodes_row)
        nodes_row.setContentsMargins(0, 0, 0, 0)
        nodes_row.setSpacing(8)
        nodes_row.addWidget(self.nodes, 1)
        nodes_row.addWidget(self.give)
        nodes_row.addWidget(self.take)
        self._nodes_row.hide()
        row = QHBoxLayout()
        row.setSpacing(8)
        row.addWidget(self.field, 1)
        row.addWidget(self.keep)
        row.addWidget(self.forget)
        column = QVBoxLayout(self)
        column.setContentsMargins(16, 12, 16, 14)
        column.setSpacing(8)
        column.addWidget(make_label("Hugging Face token", "subheading"))
        column.addWidget(self.state)
        column.addLayout(row)
        column.addWidget(self._nodes_row)
        column.addWidget(self.banner)

    def refresh(self) -> None:
        """Check again whether there is a token."""
        self._bridge.run(lambda core, report: _ask(core), self._show_found)

    def _show_found(self, found: tuple[TokenPlace, str]) -> None:
        place, where = found
        self.state.setText(_WORDS[place].format(where=where or "on this PC"))
        # A token from the environment is not ours to delete.
        self.forget.setVisible(place in ("kept", "keyring"))
        # Without a token there is nothing to copy, so nodes are not asked.
        if place == "none":
            self._show_nodes(())
        else:
            self._bridge.do(hub.ListNodeTokens(), self._show_nodes, self._show_error)

    def _show_nodes(self, found: tuple[NodeToken, ...]) -> None:
        self.nodes.setText(
            f"{describe_tokens(found)} Nodes download models themselves and need the token for "
            "private and gated ones."
        )
        places = {one.place for one in found}
        # Offered only while a node has no token of its own.
        self.give.setVisible("none" in places)
        self.take.setVisible("same" in places)
        self._nodes_row.setVisible(bool(found))

    def _keep(self) -> None:
        token = self.field.text().strip()
        if not token or not self.keep.isEnabled():
            return
        self.keep.setEnabled(False)
        self.banner.show_message("busy", "Verifying the token with the hub.")
        self._bridge.do(hub.SaveToken(token=token), self._show_kept, self._show_error)

    def _show_kept(self, owner: str) -> None:
        # Keep the secret in memory no longer than needed.
        self.field.clear()
        self.banner.show_message("good", f"Token saved. It belongs to {owner}.")
        self.refresh()

    def _forget(self) -> None:
        self._bridge.do(hub.DeleteToken(), self._show_forgotten, self._show_error)

    def _show_forgotten(self, found: tuple[NodeToken, ...]) -> None:
        left = _unasked(found)
        self.banner.show_message(
            "warning" if left else "calm",
            "Token deleted from this PC and from its nodes.",
            f"{left} did not respond and may still have it." if left else "",
        )
        self.refresh()

    def _give(self) -> None:
        self._bridge.do(hub.SendToken(), self._show_nodes, self._show_error)

    def _take(self) -> None:
        self._bridge.do(hub.RemoveToken(), self._show_taken, self._show_error)

    def _show_taken(self, found: tuple[NodeToken, ...]) -> None:
        if left := _unasked(found):
            self.banner.show_message("warning", f"{left} did not respond.")
        self.refresh()

    def _show_error(self, error: RacklessError) -> None:
        self.keep.setEnabled(bool(self.field.text().strip()))
        self.banner.show_error(error)


async def _ask(core: CoreApi) -> tuple[TokenPlace, str]:
    return await core.do(hub.FindToken()), await core.do(hub.DescribeToken())


def _unasked(found: tuple[NodeToken, ...]) -> str:
    """Return the nodes that did not respond, as a list in words; empty: all did."""
    left = [one.node for one in found if one.place == "unknown"]
    return show_list(left) if left else ""
