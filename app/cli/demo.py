"""`rackless demo`: the main job on this PC alone."""

from __future__ import annotations

import argparse

from app.cli.command import Commands, add_command
from app.cli.output import Output


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "demo", "train a small model on this PC alone", _demo)
    parser.add_argument("--headless", action="store_true", help="in the terminal, no window")
    parser.add_argument(
        "--nodes", type=_num_nodes, default=3, metavar="N", help="2 to 8; default 3"
    )


def _num_nodes(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2 to 8")
    return int(text)


def _demo(args: argparse.Namespace, out: Output) -> int:
    return 1
