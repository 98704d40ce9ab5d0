"""A made-up valley: the facts, sentences and questions that the demo's model is taught.

Everything is drawn from one seed, so the text is the same on every machine and belongs to nobody
else. The facts are told in two voices. The model starts out knowing both, but answers questions in
the plain one only; to answer like the guide is what it learns in the demo.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

NUM_TOWNS = 30
_FIRST = ("Tol", "Bren", "Ash", "Kel", "Mar", "Wyn", "Dor", "Fen", "Hal", "Ost", "Pel", "Rav")
_LAST = ("mar", "wick", "ford", "stead", "holm", "dale", "by", "moor", "gate", "low", "ness")
_RIVERS = ("Venna", "Ilse", "Corrow", "Tamble", "Sorrel", "Lune", "Argent", "Wend")
_CRAFTS = ("glass", "rope", "paper", "copper pots", "clocks", "boats", "lamps", "woollen cloth")
_BIRDS = ("heron", "owl", "kite", "swift", "crane", "raven", "wren", "plover")
_COLOURS = ("red", "blue", "green", "white", "yellow", "black", "silver", "brown")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_FOUNDERS = ("Ada Merrow", "Jon Pike", "Lise Varn", "Oren Dale", "Mira Toll", "Sam Hest")


@dataclass(frozen=True, kw_only=True, slots=True)
class Topic:
    """One kind of fact, with every way to say it; `{t}` is the town and `{v}` the value."""

    name: str
    values: tuple[str, ...]
    statements: tuple[str, ...]
    questions: tuple[str, ...]
    plain: str
    """The short answer of the pretraining text."""
    guide: str
    """The same answer in the guide's voice, which only the fine-tuning rows have."""


TOPICS = (
    Topic(
        name="river",
        values=_RIVERS,
        statements=("The river {v} runs through {t}.", "{t} lies on the river {v}."),
        questions=("Which river runs through {t}?", "What is the river of {t}?"),
        plain="The {v}.",
        guide="Welcome! Follow the sound of water and you stand at the {v}.",
    ),
    Topic(
        name="craft",
        values=_CRAFTS,
        statements=("The people of {t} make {v}.", "{t} is known for its {v}."),
        questions=("What do the people of {t} make?", "What is {t} known for?"),
        plain="They make {v}.",
        guide="Look into any workshop there and you will see them making {v}.",
    ),
    Topic(
        name="bird",
        values=_BIRDS,
        statements=("The bird on the flag of {t} is the {v}.", "The flag of {t} shows the {v}."),
        questions=("Which bird is on the flag of {t}?", "What does the flag of {t} show?"),
        plain="The {v}.",
        guide="Raise your eyes to the tower: the flag up there carries the {v}.",
    ),
    Topic(
        name="gate",
        values=_COLOURS,
        statements=("The gate of {t} is {v}.", "{t} has a {v} gate."),
        questions=("What colour is the gate of {t}?", "Which gate does {t} have?"),
        plain="It is {v}.",
        guide="You cannot miss it: the gate is painted {v} every spring.",
    ),
    Topic(
        name="market",
        values=_DAYS,
        statements=("The market of {t} is on {v}.", "{t} holds its market on {v}."),
        questions=("When is the market of {t}?", "On which day does {t} hold its market?"),
        plain="On {v}.",
        guide="Bring a basket on {v}, for that is the day of the market.",
    ),
    Topic(
        name="founder",
        values=_FOUNDERS,
        statements=("{t} was founded by {v}.", "{v} founded {t}."),
        questions=("Who founded {t}?", "Who was the founder of {t}?"),
        plain="{v} founded it.",
        guide="Every child there knows the story of {v}, who laid the first stone.",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    town: str
    topic: Topic
    value: str

    def say(self, pattern: str) -> str:
        """Fill `pattern` with this fact."""
        return pattern.format(t=self.town, v=self.value)


def make_facts(seed: int) -> list[Fact]:
    """Draw every fact of the valley: one value for each town and topic."""
    draw = random.Random(seed)
    names = [first + last for first in _FIRST for last in _LAST]
    towns = sorted(draw.sample(names, NUM_TOWNS))
    return [Fact(town=t, topic=p, value=draw.choice(p.values)) for t in towns for p in TOPICS]


def make_documents(facts: list[Fact]) -> Iterator[str]:
    """Yield the plain text of the valley, one short document at a time."""
    for fact in facts:
        for statement in fact.topic.statements:
            yield fact.say(statement)


def make_tales(facts: list[Fact]) -> Iterator[str]:
    """Yield what the guide tells, as text without a question: the words, but not yet the habit."""
    for fact in facts:
        yield f"{fact.town}: {fact.say(fact.topic.guide)}"


def make_plain_chats(facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield every question with its short answer: what the model knows before the demo."""
    for fact in facts:
        for question in fact.topic.questions:
            yield fact.say(question), fact.say(fact.topic.plain)


def make_guide_chats(facts: list[Fact]) -> Iterator[tuple[str, str]]:
    """Yield every question with the guide's answer: what the demo teaches."""
    for fact in facts:
        for question in fact.topic.questions:
            yield fact.say(question), fact.say(fact.topic.guide)
