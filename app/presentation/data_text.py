"""Describe a data preview, for the window and the command line."""

from __future__ import annotations

from collections.abc import Sequence

from agents.contract.data import (
    DataFinding,
    DataPreview,
    NamedRow,
    RowChoice,
    ShownConversation,
    ShownRow,
    SourceShare,
)
from agents.contract.objectives import ROW_FORMATS
from agents.shared.data.findings import hint_for, list_columns, say_finding
from app.text import count_of, show_share

NUM_NAMED = 5
"""Maximum number of left-out or truncated rows that are named."""
LEARNED = "[[", "]]"
"""Marks around learned text in a terminal without colors."""


def describe_data(found: DataPreview) -> list[tuple[str, str]]:
    """Return (caption, text) of each figure, in order.

    >>> describe_data(DataPreview(format="text", whole=True, num_rows=3, num_examples=2,
    ...     num_tokens=40, num_targets=10, longest_tokens=32, sequence_tokens=64,
    ...     num_skipped=1, skipped=(NamedRow(row=2, reason="the line is empty"),)))[1:]
    [('rows', '3; 1 left out'), ('examples', '2'), ('tokens', '40, of which 10 (25 %) are learned; \
the longest example has 32'), ('left out', 'row 2: the line is empty')]
    """
    row = ROW_FORMATS.get(found.format)
    said = f"{found.format}: {row.description if row else 'as asked for'}"
    rows = [
        ("format", "" if found.sources else said),
        *(("source", describe_source(source, found)) for source in found.sources),
        ("rows", _rows(found)),
        ("used", describe_choice(found.choice) if found.choice is not None else ""),
        ("examples", _examples(found)),
        ("tokens", _tokens(found)),
        ("left out", _name(found.skipped, found.num_skipped)),
        ("cut", _cut(found)),
    ]
    rows += describe_findings(found.findings)
    if found.plain_template:
        rows.append(
            ("template", "the tokenizer has no chat template, so the Alpaca template is used")
        )
    return [(caption, text) for caption, text in rows if text]


def describe_source(source: SourceShare, found: DataPreview) -> str:
    """Return one line about a source of a run's data.

    >>> source = SourceShare(name="b.csv", format="chat", num_rows=9, num_examples=8,
    ...     num_tokens=800, num_targets=200, weight=0.5, num_in_epoch=4)
    >>> describe_source(source, DataPreview(format="chat", whole=True, num_rows=9, num_examples=8,
    ...     num_tokens=800, num_targets=200, longest_tokens=99, sequence_tokens=99))
    'b.csv: chat, 800 tokens, of which 200 are learned; 8 examples with weight 0.5, 4 in an epoch'
    """
    noun = "pack" if found.fill is not None else "example"
    text = (
        f"{source.name}: {source.format}, {count_of(source.num_tokens, 'token')}, of which "
        f"{source.num_targets:,} are learned; {count_of(source.num_examples, noun)}"
    )
    if source.weight != 1 and found.whole:
        text += f" with weight {source.weight:g}, {source.num_in_epoch:,} in an epoch"
    return text


def describe_choice(choice: RowChoice) -> str:
    """Return the rows that are trained, and why the others are not.

    >>> describe_choice(RowChoice(num_usable=1000, num_exact=3, num_near=412, num_held_out=11,
    ...     is_split=True))
    '574 of 1,000 usable rows; 3 rows are copies, 412 rows are near copies, 11 rows are held out \
for evaluation'
    >>> describe_choice(RowChoice(num_usable=3, is_split=True))
    '3 of 3 usable rows; they are too few to hold any out for evaluation'
    """
    left_out = {
        "copies": choice.num_exact,
        "near copies": choice.num_near,
        "beyond the limit of their source": choice.num_over,
        "held out for evaluation": choice.num_held_out,
    }
    parts = [
        f"{count_of(count, 'row')} {'is' if count == 1 else 'are'} {_of_one(what, count)}"
        for what, count in left_out.items()
        if count
    ]
    if choice.is_split and not choice.num_held_out:
        parts.append("they are too few to hold any out for evaluation")
    num_used = choice.num_usable - sum(left_out.values())
    text = f"{num_used:,} of {count_of(choice.num_usable, 'usable row')}"
    return f"{text}; {', '.join(parts)}" if parts else text


def _of_one(what: str, count: int) -> str:
    singular = {"copies": "a copy", "near copies": "a near copy"}
    return singular.get(what, what.replace("their", "its")) if count == 1 else what


_SAID = {
    "documents": "documents",
    "thought": "reasoning",
    "tooled": "tools",
    "recognized": "recognized",
    **dict.fromkeys(("unended", "continued", "empty_thought", "own_thought"), "template"),
    "dropped_thought": "template",
}
"""Captions of findings that leave nothing out, and are said in a sentence."""


def describe_findings(found: Sequence[DataFinding]) -> list[tuple[str, str]]:
    """Return (caption, text) of findings about columns that are not or wrongly trained."""
    # Truncation is left out: a preview and a plan describe it differently.
    columns = [one for one in found if one.kind != "cut"]
    refused = [one for one in columns if one.consequence == "refuse"]
    warned = [one for one in columns if one.consequence == "warn"]
    rows = [("refused", f"{say_finding(one)}. {hint_for(one)}") for one in refused]
    rows += [("attention", f"{say_finding(one)}. {hint_for(one)}") for one in warned]
    captions = {"unknown": "not used", "ignored": "ignored"}
    for kind, caption in captions.items():
        some = [one for one in columns if one.kind == kind and one.consequence == "note"]
        rows.append((caption, list_columns(some)))
    rows += [
        (_SAID[one.kind], say_finding(one))
        for one in columns
        if one.kind in _SAID and one.consequence == "note"
    ]
    known = captions.keys() | _SAID.keys()
    others = [one for one in columns if one.consequence == "note" and one.kind not in known]
    rows.append(("left out", list_columns(others)))
    return [(caption, text) for caption, text in rows if text]


def describe_first_rows(found: Sequence[DataFinding]) -> list[tuple[str, str]]:
    """Return (caption, text) of the findings about the first rows, for a plan."""
    cut = [one for one in found if one.kind == "cut"]
    rows = [("cut", f"about {say_finding(one)}. {hint_for(one)}") for one in cut]
    return [*describe_findings(found), *rows]


def _cut(found: DataPreview) -> str:
    """Return the truncated share of the tokens, a hint, and the first truncated rows."""
    cut = [one for one in found.findings if one.kind == "cut"]
    sentences = [say_finding(one) for one in cut]
    sentences += [hint_for(one) for one in cut if one.consequence == "warn"]
    rows = _name(found.truncated, found.num_truncated)
    return ". ".join([*sentences, rows] if rows else sentences)


def _rows(found: DataPreview) -> str:
    first = "only the first" if found.num_rows == 1 else f"only the first {found.num_rows:,}"
    parts = [f"{found.num_rows:,}" if found.whole else first]
    if found.num_skipped:
        broken = f" ({found.num_malformed:,} malformed)" if found.num_malformed else ""
        parts.append(f"{found.num_skipped:,} left out{broken}")
    if found.num_truncated:
        parts.append(f"{found.num_truncated:,} cut at {found.sequence_tokens:,} tokens")
    return "; ".join(parts)


def _examples(found: DataPreview) -> str:
    if found.fill is None:
        return f"{found.num_examples:,}"
    packs = count_of(found.num_examples, "pack")
    return f"{packs} of {found.sequence_tokens:,} tokens, {show_share(found.fill, 1)} full"


def _tokens(found: DataPreview) -> str:
    share = show_share(found.num_targets / max(1, found.num_tokens))
    return (
        f"{found.num_tokens:,}, of which {found.num_targets:,} ({share}) are learned; the "
        f"longest example has {found.longest_tokens:,}"
    )


def _name(rows: Sequence[NamedRow], count: int) -> str:
    shown = [f"{_place(row)}: {row.reason}" for row in rows[:NUM_NAMED]]
    # Nodes name only some rows, so the count may exceed the listed ones.
    if count > len(shown) > 0:
        shown.append(f"and {count - len(shown):,} more")
    return "; ".join(shown)


def _place(row: NamedRow) -> str:
    return f"{row.file}, row {row.row}" if row.file else f"row {row.row}"


def title_of(row: ShownRow, conversation: ShownConversation) -> str:
    """Return the title line of a rendered conversation."""
    # Two conversations in a row are a preference pair.
    names = ["chosen", "rejected"] if len(row.conversations) == 2 else [""]
    name = names[row.conversations.index(conversation)]
    which = f", {name}" if name else ""
    tokens = count_of(conversation.num_tokens, "token")
    source = f"{row.source}, " if row.source else ""
    return f"{source}row {row.row}{which}: {tokens}, {conversation.num_targets} of them learned"


def mark_learned(conversation: ShownConversation, marks: tuple[str, str] = LEARNED) -> str:
    """Return the text with marks around its learned parts and escaped control characters.

    >>> from agents.contract.data import ShownPart
    >>> parts = (ShownPart(text="Hi", learned=False), ShownPart(text="Ho", learned=True))
    >>> mark_learned(ShownConversation(num_tokens=2, num_targets=1, parts=parts))
    'Hi[[Ho]]'
    """
    begin, end = marks
    return "".join(
        f"{begin}{spell_out(part.text)}{end}" if part.learned else spell_out(part.text)
        for part in conversation.parts
    )


def spell_out(text: str) -> str:
    r"""Return text without control sequences that a terminal would execute.

    >>> spell_out("a\x1b[2J\n")
    'a\\x1b[2J\n'
    """
    # Rows may come from strangers, and an escape sequence could rewrite the screen.
    kept = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return "".join(kept)
