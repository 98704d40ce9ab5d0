"""Connect the main window's actions, and put them into menus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.gui.kit.actions import Actions
from app.gui.kit.theme import SCHEMES
from app.gui.session.context import Context
from app.gui.shell.dialogs import Dialogs
from app.gui.shell.navigation import PLACES
from app.gui.shell.shell import Shell


def make_actions(window: Shell, dialogs: Dialogs, context: Context) -> Actions:
    """Return the window's actions, connected to their handlers."""
    actions = Actions(window, context.theme)
    handlers: dict[str, Callable[[], object]] = {
        "new_run": dialogs.ask_new_run,
        "open_run_file": dialogs.choose_run_file,
        "add_node": dialogs.ask_node,
        "add_this_pc": lambda: dialogs.ask_node(this_pc=True),
        "check": window.check,
        "overview": lambda: window.go_to("overview"),
        "nodes": lambda: window.go_to("nodes"),
        "runs": lambda: window.go_to("runs"),
        "artifacts": lambda: window.go_to("artifacts"),
        "data": lambda: window.go_to("data"),
        "settings": lambda: window.go_to("settings"),
        "shortcuts": dialogs.show_shortcuts,
        "help": dialogs.show_help,
        "save_report": dialogs.save_report,
        "palette": dialogs.open_palette,
        "refresh": window.refresh,
        "find": window.find_in_log,
        "close": window.close,
        "quit": window.quit,
    }
    for name, handler in handlers.items():
        actions.add(name, handler)
    for name in SCHEMES:
        # Not a lambda: all of them would see the last name of the loop.
        actions.add(name, partial(context.preferences.set, "theme", name))
    if window.demo is not None:
        actions.add("run_demo", window.run_demo)
    return actions


def fill_menus(window: Shell) -> None:
    """Fill the menu bar; every action with a shortcut is in one of its menus."""
    menus = {
        "&File": ("new_run", "open_run_file", "", "close", "quit"),
        "&Nodes": ("add_node", "add_this_pc", "check", "", "refresh"),
        "&View": ("palette", "", *PLACES, "", "find", "", "system", "light", "dark"),
        "&Help": ("help", "save_report", "", "shortcuts", "palette"),
    }
    for title, names in menus.items():
        menu = window.menuBar().addMenu(title)
        for name in names:
            if name:
                menu.addAction(window.actions_[name])
            else:
                menu.addSeparator()
