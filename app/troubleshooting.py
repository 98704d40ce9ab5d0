"""Read and search the troubleshooting page, which ships with the app.

Each section has a topic, its anchor on the page. Errors, rows of a check and `rackless help` refer
to it by this stable word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

_ANCHOR = re.compile(r'<a id="([a-z0-9-]+)"></a>')
_WORD = re.compile(r"[a-z0-9_]+")
# Weights of a word by the part of the section that holds it.
_IN_TOPIC, _IN_TITLE, _IN_SIGNS, _IN_TEXT = 6, 5, 3, 1
_SIGNS = "- **Seen as:**"
_FILLER = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "i", "in", "is", "it", "my")
) | {"of", "on", "or", "s", "the", "to", "with"}
"""Words of a search that are ignored, since they say nothing about a problem."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One symptom with its signs, cause, check and remedy."""

    topics: tuple[str, ...]
    """Anchors of the section; the first one is its name, the others are aliases."""
    title: str
    area: str
    """Heading of the part of the page that contains it."""
    text: str
    """Body in Markdown, without the title."""

    @property
    def topic(self) -> str:
        return self.topics[0]


@functools.cache
def read_sections() -> tuple[Section, ...]:
    """Return the sections in the order of the page."""
    import importlib.resources  # on use: few commands need it

    page = importlib.resources.files("resources") / "help" / "troubleshooting.md"
    return parse_sections(page.read_text(encoding="utf-8"))


def parse_sections(page: str) -> tuple[Section, ...]:
    """Return the sections of a page in Markdown.

    >>> one, = parse_sections('## Area\\n<a id="a"></a>\\n<a id="b"></a>\\n### Title\\n\\nText.\\n')
    >>> one.topics, one.title, one.area, one.text
    (('a', 'b'), 'Title', 'Area', 'Text.')
    """
    sections: list[Section] = []
    area, title = "", ""
    topics: list[str] = []
    lines: list[str] = []

    def end() -> None:
        if title:
            text = "\n".join(lines).strip()
            sections.append(Section(topics=tuple(named), title=title, area=area, text=text))

    named: list[str] = []
    for line in page.splitlines():
        anchor = _ANCHOR.fullmatch(line.strip())
        if anchor:
            topics.append(anchor[1])
        elif line.startswith("## "):
            end()
            area, title, lines = line[3:].strip(), "", []
        elif line.startswith("### "):
            end()
            named, topics = topics, []
            title, lines = line[4:].strip(), []
        else:
            lines.append(line)
    end()
    return tuple(sections)


def find_section(topic: str) -> Section | None:
    """Return the section with this topic, or None."""
    return next((section for section in read_sections() if topic in section.topics), None)


def topic_of(name: str) -> str:
    """Return the topic of an error's code or a check's name; empty: the page has no section.

    >>> topic_of("tcp"), topic_of("usage")
    ('link', '')
    """
    section = find_section(name) if name else None
    return section.topic if section else ""


def search_sections(words: str) -> tuple[Section, ...]:
    """Return the sections that contain the words, the best first; a topic finds its section only.

    Words match prefixes of words. Sections that lack some of the words come last.
    """
    exact = find_section(words.strip().lower())
    if exact is not None:
        return (exact,)
    wanted = _words_of(words)
    wanted = [word for word in wanted if word not in _FILLER] or wanted
    ranked = []
    for number, section in enumerate(read_sections()):
        scores = [_score(section, word) for word in wanted]
        hits = sum(score > 0 for score in scores)
        if hits and 2 * hits >= len(wanted):  # at least half of the words
            ranked.append((-hits, -sum(scores), number, section))
    return tuple(section for *_, section in sorted(ranked, key=lambda one: one[:3]))


def _score(section: Section, word: str) -> int:
    signs, _, rest = section.text.partition("\n")
    if not signs.startswith(_SIGNS):
        signs, rest = "", section.text
    places: Sequence[tuple[int, str]] = (
        (_IN_TOPIC, " ".join(section.topics)),
        (_IN_TITLE, section.title),
        (_IN_SIGNS, signs),
        (_IN_TEXT, rest),
    )
    return sum(
        weight for weight, text in places if any(w.startswith(word) for w in _words_of(text))
    )


def _words_of(text: str) -> list[str]:
    return _WORD.findall(text.lower())
