"""`rackless chat`: announced, not here yet."""

from __future__ import annotations

import argparse

from app.cli.command import Commands, add_command
from app.cli.output import Output
from app.errors import NotAvailableYet


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "chat", "ask a trained model (not available yet)", _chat)
    parser.add_argument("artifact", metavar="ARTIFACT_OR_RUN")
    parser.add_argument("--prompt", required=True, metavar="TEXT")


def _chat(args: argparse.Namespace, out: Output) -> int:
    raise NotAvailableYet(
        "chat is not available yet",
        "Export the model and load it with Transformers: rackless export RUN --to merged --out DIR",
    )
