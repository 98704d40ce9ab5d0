"""Items on the disk of the selected node, with the reason to keep each, and Delete."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout

from app.artifacts.node_storage import FreedStorage
from app.artifacts.storage_rules import NodeStorage, StoredItem, choose, describe_storage
from app.core.storage import FreeStorage, ReadStorage
from app.errors import RacklessError
from app.gui.kit.banner import Banner
from app.gui.kit.confirm import confirm
from app.gui.kit.primitives import Button, make_label
from app.gui.repairs.node_pane import ChangingPane
from app.gui.session.bridge import work_of
from app.gui.session.context import Context
from app.gui.tables.rows_model import Column, RowsModel
from app.gui.tables.view import TableView
from app.text import count_of, show_bytes, show_foreign, show_moment


class StoragePane(ChangingPane):
    """The disk of one node."""

    asks_each_time = True  # a run may have filled the disk while this tab was hidden

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._storage: NodeStorage | None = None
        theme = context.theme
        self.model: RowsModel[StoredItem] = RowsModel(self._columns(), key=lambda one: one.name)
        self.table = TableView(theme, self.model, "Storage")
        self.table.sort_by("Size", Qt.SortOrder.DescendingOrder)
        self.summary = make_label(role="muted", wraps=True)
        self.again = Button(theme, "Refresh", self.refresh, icon="refresh", role="link")
        self.leftovers = Button(
            theme,
            "Delete leftovers\u2026",
            self._ask_leftovers,
            tip="Delete interrupted transfers, files without a name, and environments that "
            "nothing needs",
        )
        self.delete = Button(
            theme, "Delete\u2026", self._ask_one, role="danger", tip="Delete the selected item"
        )
        head = QHBoxLayout()
        head.setSpacing(8)
        head.addWidget(self.summary, 1)
        for button in (self.again, self.leftovers, self.delete):
            head.addWidget(button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 12, 0, 0)
        column.setSpacing(8)
        column.addLayout(head)
        column.addWidget(self.banner)
        column.addWidget(self.table, 1)
        self.reason = make_label(role="muted", wraps=True)
        column.addWidget(self.reason)
        self.table.chosen.connect(self._enable)
        self._enable()
        self.show_node("")

    def refresh(self) -> None:
        """Read the items on the node's disk."""
        name = self._shown = self._name
        # Items of the previous node must not be offered for deletion on this one.
        self._storage = None
        self.table.say_when_empty("")
        self.model.reset(())
        self.summary.setText(
            f"Reading from {name}\u2026" if name else "Select a node to see its disk."
        )
        if name:
            self.read(work_of(ReadStorage(node=name)), self._take, self._fail)
        else:
            self.stop_reading()
        self.show_work()
        self._enable()

    # ------------------------------------------------------------ table

    def _columns(self) -> list[Column[StoredItem]]:
        return [
            Column(title="Kind", text=lambda one: one.kind, width_px=104),
            Column(title="Item", text=lambda one: show_foreign(one.name), stretches=True),
            Column(
                title="Size",
                text=lambda one: show_bytes(one.size_bytes),
                sort=lambda one: one.size_bytes,
                progress=self._share,
                tip="The bar is its share of the disk",
                width_px=168,
            ),
            Column(
                title="Last used",
                text=lambda one: show_moment(one.used_s or None, self._context.cluster.now_s()),
                sort=lambda one: one.used_s,
                width_px=152,
            ),
            Column(
                title="Protected",
                text=lambda one: show_foreign(one.protected) or "no",
                stretches=True,
            ),
        ]

    def _share(self, item: StoredItem) -> float | None:
        disk_bytes = self._storage.disk_bytes if self._storage is not None else 0
        return item.size_bytes / disk_bytes if disk_bytes else None

    def _take(self, storage: NodeStorage) -> None:
        self._storage = storage
        self.table.say_when_empty("Rackless has stored nothing on this disk.")
        self.model.reset(storage.items)
        self.summary.setText(describe_storage(storage))
        self._enable()

    def _fail(self, error: RacklessError) -> None:
        self.summary.setText("")
        self.banner.show_error(error)
        self._enable()

    def _enable(self) -> None:
        item = self.table.selected()
        protected = item.protected if item is not None else ""
        self.reason.setText(f"It is not deleted: {show_foreign(protected)}.")
        self.reason.setVisible(bool(protected))
        is_idle = self.is_idle
        self.delete.setEnabled(is_idle and item is not None and not item.protected)
        self.leftovers.setEnabled(is_idle and bool(self._find_leftovers()))
        self.again.setEnabled(is_idle and bool(self._name))

    def _find_leftovers(self) -> Sequence[StoredItem]:
        return choose(self._storage, ()) if self._storage is not None else ()

    # ------------------------------------------------------------ deletion

    def _ask_one(self) -> None:
        item = self.table.selected()
        if item is not None:
            self._ask_to_delete((item,), show_foreign(item.name))

    def _ask_leftovers(self) -> None:
        items = self._find_leftovers()
        self._ask_to_delete(items, count_of(len(items), "item"))

    def _ask_to_delete(self, items: Sequence[StoredItem], what: str) -> None:
        size = show_bytes(sum(item.size_bytes for item in items))
        if not items or not confirm(
            self,
            self._context.theme,
            f"Delete {what} on {self._shown}?",
            f"{size} become free. What a run needs and last copies are never deleted.",
            "Delete",
            is_dangerous=True,
        ):
            return
        name, names = self._shown, [item.name for item in items]
        self.change(
            f"Deleting on {name}",
            FreeStorage(node=name, names=names),
            show_freed,
            at_close=f"Deleting on {name} stops after the present item. Items not reached stay.",
        )
        self._enable()


def show_freed(freed: FreedStorage, banner: Banner) -> None:
    """Show how much is free again, and which items stay with the reason."""
    kept = "\n".join(f"{name} stays: {why}" for name, why in freed.kept)
    banner.show_message(
        "warning" if kept else "good",
        f"{show_bytes(freed.freed_bytes)} are free again on {freed.node}",
        show_foreign(kept, keep="\n"),
    )
