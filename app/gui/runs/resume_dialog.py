"""Resume dialog: choose the checkpoint, the nodes, and whether to verify the resume."""

from __future__ import annotations

from dataclasses import dataclass

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QCheckBox, QDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.core.runs import FindCheckpoints
from app.events import CheckpointSnapshot, RunSnapshot
from app.gui.kit import primitives
from app.gui.kit.flow_layout import FlowLayout
from app.gui.kit.inputs import NumberBox
from app.gui.kit.primitives import set_tooltip
from app.gui.session.context import Context
from app.gui.tables.rows_model import RowsModel
from app.gui.tables.run_columns import checkpoint_columns
from app.gui.tables.view import TableView

VERIFIED_STEPS = 3
MARGIN_PX = 24
MAX_NODES_PX = 152
"""Maximum height of the list of nodes, in pixels; a longer list scrolls."""


@dataclass(frozen=True, slots=True)
class ResumeChoice:
    step: int | None
    """Step of the checkpoint; None: the newest usable one."""
    nodes: tuple[str, ...]
    verify_steps: int | None
    """Number of logged steps to replay; None: no verification."""


def describe_choice(newest: int, known: int | None, damaged: int | None = None) -> str:
    """Return a note on the newest usable checkpoint and on newer ones that cannot be used.

    Args:
        newest: step of the newest usable checkpoint.
        known: step of the newest checkpoint that was saved; None: unknown.
        damaged: step of a newer checkpoint that was found but is damaged; None: no such one.

    >>> describe_choice(80, 80)
    'The newest is selected. An older one repeats the steps after it.'
    >>> describe_choice(80, 90, 90)
    'The checkpoint of step 90 is damaged. The one of step 80 is selected.'
    """
    if damaged is not None and (known is None or known <= damaged):
        return f"The checkpoint of step {damaged} is damaged. The one of step {newest} is selected."
    if known is None or known <= newest:
        return "The newest is selected. An older one repeats the steps after it."
    return (
        f"A newer checkpoint, of step {known}, is on a node that does not respond. Resuming from "
        f"step {newest} discards it: turn that node on to use it."
    )


class ResumeDialog(QDialog):
    """Asks for checkpoint and nodes; opens at once, and lists the checkpoints as nodes answer."""

    def __init__(self, context: Context, parent: QWidget, run: RunSnapshot) -> None:
        super().__init__(parent)
        self._context, self._run = context, run
        self.setWindowTitle(f"Resume {run.name}")
        self.resize(760, 500)
        self.model: RowsModel[CheckpointSnapshot] = RowsModel(
            checkpoint_columns(context.cluster.now_s), key=lambda item: item.step
        )
        self.table = TableView(context.theme, self.model, "Checkpoints")
        self.table.sort_by("Step", Qt.SortOrder.DescendingOrder)
        self.verify = QCheckBox("Replay the last steps first to verify the resume:")
        set_tooltip(
            self.verify,
            "Starts at the newest checkpoint with that many logged steps after it. Every loss "
            "must match: bit-exact on the same devices, within rounding on others.",
        )
        self.num_verified = NumberBox(
            minimum=1, maximum=1000, value=VERIFIED_STEPS, suffix=" steps"
        )
        self.num_verified.setAccessibleName("Steps to verify")
        self._note = primitives.make_label(
            "Looking for checkpoints on the nodes\u2026", "muted", wraps=True
        )
        self.boxes = self._make_boxes()
        self._problem = primitives.make_label(role="problem", wraps=True)
        self.start = primitives.Button(
            context.theme, "Resume", self.accept, icon="resume", role="primary"
        )
        column = QVBoxLayout(self)
        column.setContentsMargins(MARGIN_PX, 20, MARGIN_PX, 20)
        column.setSpacing(8)
        column.addWidget(primitives.make_label("Checkpoint", "heading"))
        column.addWidget(self._note)
        column.addWidget(self.table, 1)
        proof = QHBoxLayout()
        proof.setSpacing(8)
        proof.addWidget(self.verify)
        proof.addWidget(self.num_verified)
        proof.addStretch(1)
        column.addLayout(proof)
        column.addSpacing(8)
        column.addWidget(primitives.make_label("Nodes", "heading"))
        column.addWidget(
            primitives.make_label(
                "You can choose different nodes: the batch stays the same, shares are measured "
                "again, and no row is seen twice.",
                "muted",
                wraps=True,
            )
        )
        column.addWidget(self._make_nodes())
        column.addWidget(self._problem)
        column.addLayout(primitives.make_dialog_buttons(context.theme, self, self.start))
        self.table.chosen.connect(self._review)
        self.verify.toggled.connect(lambda checked: self._review())
        self._op = context.bridge.do(
            FindCheckpoints(run_id=run.run_id),
            self._show_checkpoints,
            lambda error: self._note.setText(str(error)),
        )
        # Listing may take as long as the slowest node; a closed dialog needs no answer.
        self.finished.connect(lambda code: self._op.cancel())
        self._review()

    def choice(self) -> ResumeChoice:
        """Return the answers; a verified resume picks its checkpoint itself, so its step is
        None.
        """
        chosen = self.table.selected()
        verifies = self.verify.isChecked()
        return ResumeChoice(
            # Verification needs logged steps after the checkpoint, so the core picks one that has
            # enough.
            step=chosen.step if chosen and not verifies else None,
            nodes=tuple(name for name, box in self.boxes.items() if box.isChecked()),
            verify_steps=self.num_verified.value() if verifies else None,
        )

    def _make_boxes(self) -> dict[str, QCheckBox]:
        boxes = {}
        for node in self._context.cluster.node_list():
            box = QCheckBox(node.name if node.state == "online" else f"{node.name} ({node.state})")
            box.setEnabled(node.state == "online")
            box.setChecked(node.state == "online" and node.name in self._run.nodes)
            set_tooltip(box, node.problem or node.address)
            box.toggled.connect(lambda checked: self._review())
            boxes[node.name] = box
        return boxes

    def _make_nodes(self) -> QWidget:
        """Return the node check boxes, wrapped over lines; beyond `MAX_NODES_PX` they scroll."""
        body = QWidget()
        row = FlowLayout(gap_px=16)
        body.setLayout(row)
        for box in self.boxes.values():
            row.addWidget(box)
        scroll = primitives.make_scroll_area(body)
        needed_px = row.heightForWidth(self.width() - 2 * MARGIN_PX)
        scroll.setFixedHeight(min(needed_px, MAX_NODES_PX))
        return scroll

    def _show_checkpoints(self, found: tuple[CheckpointSnapshot, ...]) -> None:
        self.model.reset(found)
        usable = [item.step for item in found if item.verified is not False]
        if usable:
            newest = max(usable)
            # Only a damaged checkpoint newer than the chosen one matters; older ones change
            # nothing.
            damaged = max((item.step for item in found if item.step > newest), default=None)
            self._note.setText(describe_choice(newest, self._run.newest_checkpoint_step, damaged))
            self.table.select(newest)
        elif found:
            self._note.setText("The nodes that respond have no usable checkpoint.")
        else:
            self._note.setText(
                "The nodes that respond have no checkpoint of this run. It starts over."
            )
        self._review()

    def _review(self) -> None:
        nodes = self.choice().nodes
        # See `choice`: with verification the table's selection would be ignored.
        self.table.setEnabled(not self.verify.isChecked())
        self.num_verified.setEnabled(self.verify.isChecked())
        self._problem.setText("" if nodes else "Choose at least one node that is online.")
        self._problem.setVisible(not nodes)
        self.start.setEnabled(bool(nodes))
