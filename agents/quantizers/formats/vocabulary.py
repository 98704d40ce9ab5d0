"""Vocabulary of a SentencePiece tokenizer, for models that have only a tokenizer.json.

llama.cpp joins the two neighbours whose joint piece has the highest score, and its converter reads
the scores from tokenizer.model. Transformers 5 does not save this file; the converter then gives
all pieces one score, so that llama.cpp splits nearly every text differently from the training, or
refuses the model. But the merges of tokenizer.json are in the order of those scores.
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

# Name of the unknown piece if the file gives none, as for Llama, which falls back to bytes.
_UNKNOWN = "<unk>"

# Score of a piece that no merge creates.
_NEVER = -1e9


@contextlib.contextmanager
def with_pieces(model: Path, folder: Path) -> Iterator[Path]:
    """Yield a folder of the model with a tokenizer.model, if its tokenizer is of that kind.

    Args:
        model: folder of Transformers, which is not written to.
        folder: place for a temporary folder of links, if the model lacks the file.
    """
    pieces = None if (model / PIECES_FILE).exists() else read_pieces(model)
    if pieces is None:
        yield model
        return
    linked = folder / model.name  # the converter uses the folder's name for the model
    linked.mkdir(mode=0o700, parents=True)
    try:
        for path in model.iterdir():
            (linked / path.name).symlink_to(path.resolve())
        (linked / PIECES_FILE).write_bytes(pieces)
        yield linked
    finally:
        shutil.rmtree(folder)


def read_pieces(model: Path) -> bytes | None:
    """Return the SentencePiece model behind a folder's tokenizer.json, or None if it has another
    kind.
    """
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
    known = {str(token["content"]): bool(token["special"]) for token in added}
    ids = {**rules["vocab"], **{str(token["content"]): int(token["id"]) for token in added}}
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
            # Ids must have no gaps, since an id is a position in the list.
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
    """Return the score of each merged piece: the earlier its first merge, the higher.

    >>> _score([["a", "b"], "ab c", ["a", "bc"]])
    {'ab': -0.0, 'abc': -1.0}
    """
    scores: dict[str, float] = {}
    for place, merge in enumerate(merges):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        scores.setdefault(left + right, -float(place))
    return scores
