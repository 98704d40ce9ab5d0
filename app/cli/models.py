"""`rackless models`: models of the hub."""

from __future__ import annotations

import argparse

from app.cli.parts.hub import declare_hub


def declare(parser: argparse.ArgumentParser) -> None:
    declare_hub(parser, "model")
