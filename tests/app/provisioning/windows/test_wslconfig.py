"""Keys are set in `.wslconfig` so that WSL reads them and nothing else of the user changes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.provisioning.windows.wslconfig import WslSetting, decode, merge, merge_bytes, read_value

MIRRORED = WslSetting(
    section="wsl2", key="networkingMode", value="mirrored", older_sections=("experimental",)
)
IDLE = WslSetting(section="general", key="instanceIdleTimeout", value="-1")
MEMORY = WslSetting(section="wsl2", key="memory", value="24GB")
ALL = (MIRRORED, IDLE, MEMORY)

lines = st.sampled_from(
    (
        "[wsl2]",
        "  [WSL2]  # mine",
        "[general]",
        "[experimental]",
        "[user]",
        "[broken",
        "networkingMode=nat",
        "  NETWORKINGMODE\t=  nat   # until later",
        'networkingMode="mirrored"',
        "memory=8GB",
        "memory = 8GB#half",
        'kernelCommandLine="a # b"',
        "swapFile=C:\\\\s.vhdx \\",
        "instanceIdleTimeout=60000",
        "#memory=1GB",
        "memory",
        "   ",
        "",
    )
)
files = st.lists(lines, max_size=12).flatmap(
    lambda some: st.sampled_from(("\n", "\r\n")).flatmap(
        lambda end: st.sampled_from((end.join(some), end.join((*some, ""))))
    )
)


@given(text=files)
@settings(max_examples=300, deadline=None)
def test_merging_sets_what_wsl_reads_and_keeps_all_else(text: str) -> None:
    merged = merge(text, ALL)
    assert merge(merged, ALL) == merged
    for setting in ALL:
        assert (read_value(merged, setting) or "").lower() == setting.value.lower()
    ours = ("networkingmode", "memory", "instanceidletimeout", "[wsl2]", "[general]")
    rest = merged.splitlines()
    before = ""
    for line in text.splitlines():
        is_ours = line.strip().lower().startswith(ours)
        # What continued a value of ours goes with it.
        if line.strip() and not is_ours and not before.endswith("\\"):
            assert line in rest
            rest.remove(line)
        before = line
    added = [line for line in rest if not line.strip().lower().startswith(ours)]
    assert [line for line in added if line.strip() and line not in text.splitlines()] == []
    ends = {line[len(line.rstrip("\r\n")) :] for line in merged.splitlines(keepends=True)}
    assert len(ends - {""}) == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # The first line of a key counts for WSL, so that one changes.
        ("[wsl2]\nmemory=1GB\nmemory=2GB\n", "[wsl2]\nmemory=24GB\nmemory=2GB\n"),
        # `#` within quotes is no comment.
        ('[wsl2]\nmemory="8#GB" # x\n', "[wsl2]\nmemory=24GB # x\n"),
        # A value that continues in the next line goes as a whole; a continued line is no header.
        ("[wsl2]\nmemory=8\\\n[general]\nx=1\n", "[wsl2]\nmemory=24GB\nx=1\n"),
        # A key of the same name in another section is another key.
        ("[user]\nmemory=8GB", "[user]\nmemory=8GB\n\n[wsl2]\nmemory=24GB\n"),
        ("[WSL2]\n\n# about x\n[x]\n", "[WSL2]\nmemory=24GB\n\n# about x\n[x]\n"),
    ],
)
def test_a_key_is_set_where_wsl_reads_it(before: str, after: str) -> None:
    assert merge(before, (MEMORY,)) == after


def test_the_older_section_of_a_key_counts() -> None:
    text = "[experimental]\nnetworkingMode=mirrored\n"
    assert merge(text, (MIRRORED,)) == text


@given(data=st.binary(max_size=60))
def test_every_file_keeps_its_bytes(data: bytes) -> None:
    if data.startswith(b"\xff\xfe") and len(data) % 2:
        data += b"\0"  # what is marked as UTF-16 has whole units
    mark, encoding, text = decode(data)
    assert mark + text.encode(encoding, "surrogatepass") == data
    merged = merge_bytes(data, (MEMORY,))
    assert merge_bytes(merged, (MEMORY,)) == merged
    assert merged.startswith(mark)
