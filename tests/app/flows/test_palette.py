"""The command palette's search, as data."""

import pytest

from app.flows.palette import MAX_FOUND, PaletteEntry, find_entries


def entry(title, group="action", **values):
    return PaletteEntry(title=title, group=group, **values)


ENTRIES = [
    entry("Overview", "page"),
    entry("New run", shortcut="Ctrl+N", note="Fine-tune a model"),
    entry("Add a PC", note="Add a node over SSH"),
    entry("support-chat", "run", words="support-chat-7f3a alpha"),
    entry("poems", "run"),
    entry("Stop support-chat", "run", is_common=False),
    entry("Chat with poems", "run", is_common=False),
    entry("gaming-pc", "node"),
]


def titles(query):
    return [ENTRIES[found.index].title for found in find_entries(ENTRIES, query)]


def test_nothing_typed_lists_what_is_common_in_the_order_given():
    assert titles("  ") == [one.title for one in ENTRIES if one.is_common]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("new", "New run"),
        ("nr", "New run"),
        ("NEW RUN", "New run"),
        ("run new", "New run"),
        ("chat", "support-chat"),
        ("stop", "Stop support-chat"),
        ("chat po", "Chat with poems"),
        ("pc", "Add a PC"),
        ("gpc", "gaming-pc"),
        ("ssh", "Add a PC"),
        ("7f3a", "support-chat"),
        ("aap", "Add a PC"),
    ],
)
def test_the_best_guess_comes_first(query, first):
    assert titles(query)[0] == first


def test_every_word_must_be_found():
    assert titles("stop poems") == []
    assert titles("zzz") == []


def test_the_letters_that_were_meant_are_told():
    found = find_entries(ENTRIES, "new r")[0]
    assert [ENTRIES[found.index].title[place] for place in found.places] == list("Newr")


def test_a_thousand_runs_are_cut_to_what_a_person_can_read():
    many = [entry(f"run number {number}", "run") for number in range(1000)]
    assert len(find_entries(many, "run")) == MAX_FOUND
    assert find_entries(many, "number 731")[0].index == 731
