"""Write what was measured into RELIABILITY.md, between the marks of its parts."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.master import ROOT

PAGE = ROOT / "RELIABILITY.md"


def replace_part(page: str, part: str, text: str) -> str:
    """Return the page with what stands between the marks of a part replaced.

    Raises:
        ValueError: the page has no such part.

    >>> print(replace_part("a\\n<!-- x -->\\nold\\n<!-- /x -->\\nb", "x", "new"))
    a
    <!-- x -->
    new
    <!-- /x -->
    b
    """
    begin, end = f"<!-- {part} -->\n", f"\n<!-- /{part} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"the page has no part {part}: it lies between {begin.strip()} and an end")
    before, _, rest = page.partition(begin)
    return f"{before}{begin}{text}{end}{rest.partition(end)[2]}"


def write_part(part: str, text: str, page: Path = PAGE) -> None:
    page.write_text(replace_part(page.read_text(), part, text))
