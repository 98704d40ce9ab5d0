"""Name model and data in messages as the run file does, not by their places on this node.

A node keeps what it is sent below names of its own, which say nothing to the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from agents.contract.run import AttemptIntent
from agents.contract.spec import RunSpec
from agents.errors import ExpectedError


def names_of(
    spec: RunSpec, *, model: str = "", train: str = "", more: Sequence[str] = (), held_out: str = ""
) -> dict[str, str]:
    """Return the run file's name of each place on this node.

    Args:
        spec: the run.
        model: path of the model here; empty: not known.
        train: path of the training data here.
        more: paths of the further sources of training data here.
        held_out: path of the evaluation data here.
    """
    places = {model: spec.model, train: spec.data.train, held_out: spec.data.eval_path or ""}
    others = (source.path for source in spec.data.sources[1:])
    places |= dict(zip(more, others, strict=False))
    return {place: name for place, name in places.items() if place and name}


def names_of_intent(intent: AttemptIntent) -> dict[str, str]:
    """Return the run file's name of each place of an attempt on this node."""
    return names_of(
        intent.spec,
        model=intent.model_path,
        train=intent.train_path,
        more=intent.more_paths,
        held_out=intent.eval_path or "",
    )


def rename(text: str, names: Mapping[str, str]) -> str:
    """Return a text with the names of the run file in place of this node's.

    >>> rename("/agent/data/chats-3f/chats.jsonl, row 3", {"/agent/data/chats-3f": "chats"})
    'chats/chats.jsonl, row 3'
    """
    # The longest first: a place may lie in another one.
    for place in sorted(names, key=len, reverse=True):
        text = text.replace(place, names[place])
    return text


@contextmanager
def named_as_given(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block name model and data as the run file does."""
    try:
        yield
    except ExpectedError as error:
        error.message, error.hint = rename(error.message, names), rename(error.hint, names)
        error.args = (error.message,)
        raise
