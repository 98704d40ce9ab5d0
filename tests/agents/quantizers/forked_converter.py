"""llama.cpp's converter in a fork, for tests of what it makes: nine tenths of its time are imports.

`agents.quantizers.formats.gguf.convert` runs it as a program of its own, and has its own tests.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from agents.quantizers.formats import gguf
from tests.agents.trainer.ranks import finish, start


def convert(model: Path, file: Path, kind: str, *, keeps_pieces: bool = True) -> None:
    """Write one GGUF file.

    Args:
        model: folder of the model.
        file: to write.
        kind: type of the weights.
        keeps_pieces: whether it is given a SentencePiece vocabulary that the model's folder lacks.
    """
    log = file.with_suffix(".log")
    codes = finish([start(_convert, str(model), str(file), kind.lower(), str(log), keeps_pieces)])
    assert codes == [0], log.read_text(errors="replace")[-2000:]
    log.unlink()


def _convert(model: str, file: str, kind: str, log: str, keeps_pieces: bool) -> None:
    """Be the converter: the child's side of `convert`."""
    said = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(said, stream)
    if not keeps_pieces:
        gguf.with_pieces = lambda model, folder: contextlib.nullcontext(model)
    sys.exit(gguf.main([model, file, kind]))
