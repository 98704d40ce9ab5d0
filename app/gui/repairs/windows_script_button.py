"""Button that offers the script for Windows where the selected node runs in WSL."""

from __future__ import annotations

from PySide6.QtCore import Qt

from app.events import NodeSnapshot
from app.flows.windows_script import runs_in_wsl
from app.gui.kit.primitives import Button
from app.gui.session.context import Context


class WindowsScriptButton(Button):
    """Visible only while a node in WSL is selected."""

    def __init__(self, context: Context) -> None:
        super().__init__(
            context.theme,
            "Script for Windows\u2026",
            self._open,
            icon="save",
            tip="Save the script that prepares the Windows of the selected node",
        )
        self._context = context
        self._name = ""
        self.hide()

    def show_node(self, node: NodeSnapshot | None) -> None:
        """Offer the script of a node; None: nothing is selected."""
        self._name = node.name if node is not None else ""
        self.setVisible(node is not None and runs_in_wsl(node))

    def _open(self) -> None:
        from app.gui.repairs.windows_script_dialog import WindowsScriptDialog  # on first use

        dialog = WindowsScriptDialog(self._context, self.window(), self._name)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.open()
