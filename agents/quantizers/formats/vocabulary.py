"""The vocabulary of a SentencePiece tokenizer, for a converter that finds only tokenizer.json.

llama.cpp joins the two neighbours whose joint piece has the highest score, and its converter takes
the scores from tokenizer.model. Transformers 5 saves no such file; the converter then gives all
pieces one score, so that llama.cpp splits nearly every text otherwise than the model has learned,
or refuses the model. But the merges of tokenizer.json are in the order of those scores.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PIECES_FILE = "tokenizer.model"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

# Where it is not named, as with Llama, whose tokenizers have a byte for everything.
_UNKNOWN = "<unk>"

# The score of a piece that no merge makes.
_NEVER = -1e9


@contextlib.contextmanager
def with_pieces(model: Path, folder: Path) -> Iterator[Path]:
    """Yield a folder of the model that has a tokenizer.model, if its tokenizer is of that kind.

    Args:
        model: folder of Transformers; nothing is written to it.
        folder: where one of links to its files is made if it has none, and removed afterwards.
    """
    pieces = None if (model / PIECES_FILE).exists() else read_pieces(model)
    if pieces is None:
        yield model
        return
    linked = folder / model.name  # the converter names the model by its folder
    linked.mkdir(mode=0o700, parents=True)
    try:
        for path in model.iterdir():
            (linked / path.name).symlink_to(path.resolve())
        (linked / PIECES_FILE).write_bytes(pieces)
        yield linked
    finally:
        shutil.rmtree(folder)


def read_pieces(model: Path) -> bytes | None:
    """Return the SentencePiece model that a folder's tokenizer.json came from; None: from none."""
    try:
        tokenizer = json.loads((model / "tokenizer.json").read_bytes())
        rules = tokenizer["model"]
        if rules["type"] != "BPE" or not rules.get("byte_fallback"):
            return None
        return _write(rules, tokenizer.get("added_tokens") or ())
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(rules: Mapping[str, Any], added: Any) -> bytes:
    proto: Any = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    kinds = proto.ModelProto.SentencePiece
    known = {str(one["content"]): bool(one["special"]) for one in added}
    ids = {**rules["vocab"], **{str(one["content"]): int(one["id"]) for one in added}}
    unknown = rules.get("unk_token") or _UNKNOWN
    ids.setdefault(unknown, max(ids.values(), default=-1) + 1)  # every SentencePiece model has one
    pieces = {number: piece for piece, number in ids.items()}
    scores = _score(rules["merges"])
    found = proto.ModelProto()
    found.trainer_spec.model_type = proto.TrainerSpec.BPE
    found.trainer_spec.byte_fallback = True
    found.trainer_spec.vocab_size = max(pieces) + 1
    found.normalizer_spec.name = "identity"
    found.normalizer_spec.remove_extra_whitespaces = False
    for number in range(max(pieces) + 1):
        piece = pieces.get(number)
        if piece is None:
            # Ids must have no gaps: a piece is found by its place in the list.
            kind, piece = kinds.UNUSED, f"[PAD{number}]"
        elif piece == unknown:
            kind = kinds.UNKNOWN
            found.trainer_spec.unk_id, found.trainer_spec.unk_piece = number, piece
        elif _BYTE.fullmatch(piece):
            kind = kinds.BYTE
        elif piece in known:
            kind = kinds.CONTROL if known[piece] else kinds.USER_DEFINED
        else:
            kind = kinds.NORMAL
        found.pieces.add(piece=piece, score=scores.get(piece, _NEVER), type=kind)
    return bytes(found.SerializeToString())


def _score(merges: Any) -> dict[str, float]:
    """Return the score of each piece that is joined: the earlier its first merge, the higher.

    >>> _score([["a", "b"], "ab c", ["a", "bc"]])
    {'ab': -0.0, 'abc': -1.0}
    """
    scores: dict[str, float] = {}
    for place, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(place))
    return scores
