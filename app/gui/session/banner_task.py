"""Run work with its progress, errors and a Cancel button shown in a banner."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from agents.contract.node import EnvironmentReport
from app.gui.kit.banner import Banner
from app.gui.session.bridge import Bridge, Work
from app.text import capitalize

T = TypeVar("T")


def run_in_banner(
    bridge: Bridge,
    banner: Banner,
    work: Work[T],
    success: Callable[[T], None],
    *,
    title: str,
    hint: str,
    cancelled: str,
) -> None:
    """Run `work(core, report)` and show its reports, or its error, in the banner.

    Args:
        bridge: starts the work on the core's thread.
        banner: shows the progress.
        work: reports lines of text for people.
        success: receives the result, and shows in the banner how it ended.
        title: name of the work, in the progressive form.
        hint: shown until the first report.
        cancelled: state that a cancelled run leaves behind, shown after Cancel.
    """

    def show(line: object) -> None:
        banner.show_message("busy", title, capitalize(str(line)), ("Cancel", cancel))

    def cancel() -> None:
        op.cancel()
        banner.show_message("calm", f"{title}: cancelled", cancelled)

    # The closures find `op` when they run: no button can be pressed before it is assigned.
    show(hint)
    op = bridge.run(work, success, banner.show_error, show)


def build_environment_in_banner(
    bridge: Bridge, banner: Banner, name: str, success: Callable[[EnvironmentReport], None]
) -> None:
    """Build the training environment on node `name`, with progress in the banner."""
    run_in_banner(
        bridge,
        banner,
        lambda core, report: core.nodes.setup(name, progress=report),
        success,
        title=f"Setting up {name}",
        hint="This takes a few minutes the first time.",
        cancelled=f"{name} is unchanged. Packages already downloaded stay there for next time.",
    )
