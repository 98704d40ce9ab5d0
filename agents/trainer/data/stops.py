"""Find the tokens at which generation stops: those of the model, and the one that answers teach.

The config of a base model names the end of a document, while its chat template ends answers with
another token. A model that has learned that token never stops if generation ignores it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agents.errors import ExpectedError
from agents.shared.files import bounded_work
from agents.state import read_json
from agents.trainer.data.answers import TurnEnd, find_turn_end

GENERATION_FILE = "generation_config.json"


def find_bounded_turn_end(tokenizer: Any) -> TurnEnd:
    """Return the token that ends a learned answer, found within bounds of time and memory.

    Raises:
        ExpectedError: the chat template does not end, fills the memory, or is none of several.
    """
    try:
        with bounded_work.limited_memory():
            return bounded_work.within_limits(lambda: find_turn_end(tokenizer))
    except (bounded_work.LimitReached, MemoryError) as error:
        reason = str(error) or "the memory that it may use"
        raise ExpectedError(
            f"The chat template of this model needs more than {reason}.", bounded_work.KILLED_HINT
        ) from None


def find_stops(folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids at which generation stops, those of the model's files first.

    Args:
        folder: folder of the model.
        tokenizer: its tokenizer, with the chat template of the training.

    Raises:
        ExpectedError: see `find_bounded_turn_end`.
    """
    learned = find_bounded_turn_end(tokenizer).token
    ids = [*_read_stops(folder), *([] if learned is None else [learned])]
    return tuple(dict.fromkeys(ids))


def write_stops(folder: Path, tokenizer: Any) -> None:
    """Name all stop ids in the folder's settings of generation, which every program reads.

    Raises:
        ExpectedError: see `find_bounded_turn_end`.
        OSError: the disk is full.
    """
    stops = find_stops(folder, tokenizer)
    found = read_json(folder / GENERATION_FILE)
    settings = found if isinstance(found, dict) else {"bos_token_id": tokenizer.bos_token_id}
    if stops:
        settings["eos_token_id"] = stops[0] if len(stops) == 1 else list(stops)
        (folder / GENERATION_FILE).write_text(json.dumps(settings, indent=2), encoding="ascii")


def _read_stops(folder: Path) -> list[int]:
    """Return the end ids of a model's settings of generation and of its config."""
    stops: list[int] = []
    for name in (GENERATION_FILE, "config.json"):
        found = read_json(folder / name)
        config = found if isinstance(found, dict) else {}
        for part in (config, config.get("text_config")):
            ends = part.get("eos_token_id") if isinstance(part, dict) else None
            several = ends if isinstance(ends, list) else [ends]
            stops += [end for end in several if isinstance(end, int)]
    return stops
