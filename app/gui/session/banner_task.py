"""Run work with its progress, errors and a Cancel button shown in a banner."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from agents.contract.node import EnvironmentReport
from app.core.action import Action, sentences
from app.core.nodes import SetUpNode
from app.errors import RacklessError, UnshippedLock, UserError
from app.gui.kit.banner import Banner
from app.gui.session.bridge import Bridge, Op, work_of
from app.gui.session.context import Context
from app.text import capitalize

T = TypeVar("T")


def last_while(context: Context, banner: Banner, is_so: Callable[[], bool]) -> None:
    """Hide the banner's present message once `is_so` returns False after a change of any kind."""
    cluster = context.cluster
    banner.lasts_while(
        is_so,
        *(cluster.run_changed, cluster.run_deleted, cluster.node_changed, cluster.node_removed),
        cluster.devices_changed,
    )


def last_with_run(
    context: Context, banner: Banner, run_id: str, *, with_state: bool = True
) -> None:
    """Hide the banner's message once the run is resumed, deleted, or changes its state.

    Args:
        context: of the window.
        banner: shows the message.
        run_id: run that the message is about.
        with_state: False for a result that stays true after this attempt.
    """

    def key() -> object:
        run = context.cluster.runs.get(run_id)
        return None if run is None else (run.attempt, run.state if with_state else "")

    shown = key()
    last_while(context, banner, lambda: shown is not None and key() == shown)


def last_with_node(context: Context, banner: Banner, name: str) -> None:
    """Hide the banner's message once the node changes its state, or is removed."""

    def key() -> object:
        node = context.cluster.nodes.get(name)
        return None if node is None else node.state

    shown = key()
    last_while(context, banner, lambda: key() == shown)


def run_in_banner(  # noqa: PLR0913 - all texts of a banner
    bridge: Bridge,
    banner: Banner,
    action: Action[T],
    success: Callable[[T], None],
    *,
    title: str,
    hint: str,
    cancelled: str,
    stopped: Callable[[], object] = lambda: None,
    failed: Callable[[RacklessError], None] | None = None,
    heard: Callable[[object], None] | None = None,
    at_close: str = "",
) -> Op:
    """Do an action and show its progress, or its error, in the banner.

    Args:
        bridge: starts the action on the core's thread.
        banner: shows the progress.
        action: done once.
        success: receives the answer, and shows in the banner how it ended.
        title: name of the action, in the progressive form.
        hint: shown until the first report.
        cancelled: state that a cancelled run leaves behind, shown after Cancel.
        stopped: called after Cancel.
        failed: shows an error in the banner; None: it stays there until it is dismissed.
        heard: receives each event of the action, also those that the banner does not show.
        at_close: effect of closing the window on the action; empty: closing asks nothing.
    """

    def show(text: str) -> None:
        banner.show_message("busy", title, capitalize(text), ("Cancel", cancel))

    def take(event: object) -> None:
        if heard is not None:
            heard(event)
        show_progress(event)

    def cancel() -> None:
        op.cancel()
        banner.show_message("calm", f"{title}: cancelled", cancelled)
        stopped()

    # The closures find `op` when they run: no button can be pressed before it is assigned.
    show_progress = sentences(show)
    show(hint)
    error = failed or banner.show_error
    op = bridge.run(work_of(action), success, error, take, at_close=at_close)
    return op


def show_error_while(context: Context, banner: Banner, error: RacklessError) -> None:
    """Show an error; one about a node until that node changes its state."""
    banner.show_error(error)
    where = error.where if isinstance(error, UserError) else ""
    if where in context.cluster.nodes:
        last_with_node(context, banner, where)


def show_run_error(context: Context, banner: Banner, run_id: str, error: RacklessError) -> None:
    """Show the error of an action on a run until the run changes its state."""
    banner.show_error(error)
    last_with_run(context, banner, run_id)


def build_environment_in_banner(
    context: Context, banner: Banner, name: str, success: Callable[[EnvironmentReport], None]
) -> None:
    """Build the training environment on node `name`, with progress in the banner.

    Hashes that Rackless does not ship are accepted only by a button of their own.
    """

    def show_failure(error: RacklessError) -> None:
        if not isinstance(error, UnshippedLock):
            show_error_while(context, banner, error)
            return
        button = (f"Lock {error.build} and set up", partial(_build, context, banner, name, success))
        banner.show_message("warning", error.message, error.advice, button, topic=error.topic)
        last_with_node(context, banner, name)

    _build(context, banner, name, success, show_failure)


def _build(
    context: Context,
    banner: Banner,
    name: str,
    success: Callable[[EnvironmentReport], None],
    failed: Callable[[RacklessError], None] | None = None,
) -> None:
    """Build an environment; without `failed`, hashes that Rackless does not ship are agreed to."""
    run_in_banner(
        context.bridge,
        banner,
        SetUpNode(name=name, accept_index=failed is None),
        success,
        title=f"Setting up {name}",
        hint="This takes a few minutes the first time.",
        cancelled=f"{name} is unchanged. Packages already downloaded stay there for next time.",
        failed=failed or partial(show_error_while, context, banner),
        at_close=f"Setting up {name} stops. Packages already downloaded stay there for next time.",
    )
