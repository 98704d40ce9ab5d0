"""Work that a banner tells of while it goes on, with a button that ends it."""

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
    """Run `work(core, report)`; what it reports, and what went wrong, shows in the banner.

    Args:
        bridge: to the core.
        banner: tells of it.
        work: runs on the core's thread; its reports are lines for people.
        success: gets the result, and says in the banner how it ended.
        title: what goes on.
        hint: shown until the first report.
        cancelled: what is left after a cancel, for the one who wonders.
    """

    def show(line: object) -> None:
        banner.show_message("busy", title, capitalize(str(line)), ("Cancel", cancel))

    def cancel() -> None:
        op.cancel()
        banner.show_message("calm", f"{title}: cancelled", cancelled)

    show(hint)
    op = bridge.run(work, success, banner.show_error, show)


def build_environment_in_banner(
    bridge: Bridge, banner: Banner, name: str, success: Callable[[EnvironmentReport], None]
) -> None:
    """Build the training environment on a node."""
    run_in_banner(
        bridge,
        banner,
        lambda core, report: core.nodes.setup(name, progress=report),
        success,
        title=f"Setting up {name}",
        hint="This takes some minutes the first time.",
        cancelled=f"{name} is as it was. Packages that came already are kept there.",
    )
