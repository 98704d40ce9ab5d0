"""Buttons for actions on the selected node."""

from __future__ import annotations

from collections.abc import Callable

from app.gui.kit.primitives import Button
from app.gui.kit.theme import Theme

Action = Callable[[], object]


def make_node_buttons(
    theme: Theme, remove: Action, prepare: Action, setup: Action, wake: Action, measure: Action
) -> dict[str, Button]:
    """Return the buttons by their names, in the order of the page's head."""
    return {
        "remove": Button(
            theme,
            "Remove",
            remove,
            icon="delete",
            role="danger",
            tip="Remove the selected node from Rackless; nothing is deleted on it",
        ),
        "prepare": Button(
            theme,
            "Prepare\u2026",
            prepare,
            icon="prepare",
            tip="Check the selected node, offer each repair, set it up, and check again",
        ),
        "setup": Button(
            theme,
            "Set up environment",
            setup,
            icon="setup",
            tip="Build the training environment on the selected node from the lock file",
        ),
        "wake": Button(
            theme,
            "Wake",
            wake,
            icon="resume",
            tip="Wake the selected node over its network, and wait until it answers",
        ),
        "measure": Button(
            theme,
            "Measure",
            measure,
            icon="speed",
            tip="Measure how fast its GPUs are, about 20 seconds each, for better plans",
        ),
    }
