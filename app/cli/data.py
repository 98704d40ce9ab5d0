"""`rackless data`: data sets of the hub, and the rows of data on this PC."""

from __future__ import annotations

import argparse

from app.cli.kit.command import add_command
from app.cli.parts.hub import declare_hub
from app.cli.parts.rows import declare_show


def declare(parser: argparse.ArgumentParser) -> None:
    verbs = declare_hub(parser, "data")
    declare_show(
        add_command(verbs, "show", "show the rows of data on this PC, as a run learns them")
    )
