"""List every page, action, run and node for the command palette."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from app.events import RunSnapshot
from app.flows.palette import PaletteEntry
from app.gui.kit.actions import TEXTS
from app.gui.runs.run_actions import RunActions, can_export, can_resume, can_save, can_stop
from app.gui.session.context import Context
from app.gui.shell.command import Command
from app.gui.shell.navigation import PLACES
from app.gui.shell.shell import Shell
from app.telemetry.state import describe_node, describe_run, progress_share
from app.text import show_list, show_moment, show_share


def list_commands(
    window: Shell, context: Context, repeat_run: Callable[[RunSnapshot], object]
) -> list[Command]:
    """Return pages and actions, then runs (newest first) and nodes, then the actions on runs."""
    actions = RunActions(context, window, window.banner)
    runs = context.cluster.run_list()
    return [
        *_pages(window),
        *_actions(window),
        *(_open_run(window, context, run) for run in runs),
        *_nodes(window, context),
        *(command for run in runs for command in _run_actions(actions, repeat_run, run)),
    ]


def _pages(window: Shell) -> Iterator[Command]:
    for name in PLACES:
        texts = TEXTS[name]
        entry = PaletteEntry(
            title=texts.text,
            group="page",
            icon=name,
            shortcut=texts.shortcut,
            words=f"go to {texts.tip}",
        )
        yield Command(entry, window.actions_[name].trigger)


def _actions(window: Shell) -> Iterator[Command]:
    for name, texts in TEXTS.items():
        # Pages have rows of their own; the palette is already open.
        if name in PLACES or name == "palette" or not window.actions_.has(name):
            continue
        action = window.actions_[name]
        # A row that does nothing when chosen would look like a bug.
        if action.isEnabled():
            # `Light` alone says nothing outside its menu.
            title = f"Theme: {texts.text}" if name in ("system", "light", "dark") else texts.text
            entry = PaletteEntry(
                title=title,
                group="action",
                icon=texts.icon or "right",
                note=texts.tip,
                shortcut=texts.shortcut,
            )
            yield Command(entry, action.trigger)


def _open_run(window: Shell, context: Context, run: RunSnapshot) -> Command:
    now_s = context.cluster.now_s()
    notes = [describe_run(run.state, run.phase).text]
    if run.state == "running":
        notes.append(show_share(progress_share(run)))
    notes.append(show_moment(run.started_s or run.created_s, now_s))
    entry = PaletteEntry(
        title=run.name,
        group="run",
        icon="runs",
        note=" \u00b7 ".join(notes),
        words=f"open show {run.run_id} {show_list(run.nodes)}",
    )
    return Command(entry, partial(window.open_run, run.run_id))


def _nodes(window: Shell, context: Context) -> Iterator[Command]:
    now_s = context.cluster.now_s()
    for node in context.cluster.node_list():
        note = f"{describe_node(node, now_s).text} \u00b7 {node.address}"
        entry = PaletteEntry(
            title=node.name, group="node", icon="nodes", note=note, words="open show pc"
        )
        yield Command(entry, partial(window.open_node, node.name))


def _run_actions(
    actions: RunActions, repeat_run: Callable[[RunSnapshot], object], run: RunSnapshot
) -> Iterator[Command]:
    offered = (
        ("Stop", "stop", can_stop(run), actions.stop),
        ("Save a checkpoint of", "save", can_save(run), actions.save),
        ("Resume", "resume", can_resume(run), actions.resume),
        ("Export", "export", can_export(run), actions.export),
        ("Chat with", "chat", can_export(run), actions.chat),
        ("Repeat", "add", True, repeat_run),
    )
    for verb, icon, is_possible, act in offered:
        if is_possible:
            entry = PaletteEntry(
                title=f"{verb} {run.name}",
                group="run",
                icon=icon,
                note=describe_run(run.state, run.phase).text,
                words=run.run_id,
                is_common=False,  # found by typing, not listed in an empty search
            )
            yield Command(entry, partial(act, run))
