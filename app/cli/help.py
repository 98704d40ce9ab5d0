"""`rackless help`: search the troubleshooting page, without a network."""

from __future__ import annotations

import argparse
import re

from app.cli.kit.output import Output
from app.errors import UserError
from app.troubleshooting import Section, read_sections, search_sections

MOST_OTHERS = 6
"""Maximum number of further sections that are named below the best one."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=_help)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TOPIC|WORDS",
        help="what follows `more:` below an error, or words such as: out of memory; "
        "default: list all topics",
    )


def _help(args: argparse.Namespace, out: Output) -> int:
    words = " ".join(args.words).strip()
    if not words:
        sections = read_sections()
        out.document([_as_row(section) for section in sections])
        out.table(["TOPIC", "PROBLEM"], [[s.topic, s.title] for s in sections])
        out.note("Read one with: rackless help TOPIC. Search with: rackless help WORDS")
        return 0
    found = search_sections(words)
    if not found:
        raise UserError(
            f"the troubleshooting page has nothing on {words!r}",
            "List all topics: rackless help. For a report to send: rackless doctor",
        )
    out.document([_as_row(section) for section in found])
    out.text(_show(found[0]))
    if others := found[1 : 1 + MOST_OTHERS]:
        out.text("\nAlso: rackless help ...")
        out.table(["TOPIC", "PROBLEM"], [[s.topic, s.title] for s in others])
    return 0


def _as_row(section: Section) -> dict[str, str]:
    return {
        "topic": section.topic,
        "title": section.title,
        "area": section.area,
        "text": section.text,
    }


def _show(section: Section) -> str:
    """Return a section as plain text; commands keep their backquotes, which show where they end."""
    text = re.sub(r"^- \*\*(.+?)\*\*", r"\n\1", section.text, flags=re.MULTILINE)
    return f"{section.title} ({section.topic})\n{text}"
