"""A model that stays loaded for a conversation: its program, its words, and why it ended.

The program is a child of this connection: it ends with it. It also ends by itself when nothing was
asked for long, and is ended here when a run or an export wants its GPU. A chat leases nothing, so
that these can start at once; it looks who has leased the GPU instead.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agents.children import Children
from agents.errors import ExpectedError

LOOK_S = 0.5
"""How often it looks whether somebody has taken the GPU."""
Said = dict[str, Any]
Reader = Callable[[str], Said]


class Chat:
    """One loaded model. Whoever asks reads its words from `listen`; one at a time."""

    def __init__(self, find_taker: Callable[[], str | None]) -> None:
        """Make it; `find_taker` returns the name of what has taken its GPU, or None."""
        self.asking = threading.Lock()
        self.ended = ""
        """Why it has ended; empty: it has not."""
        self._find_taker = find_taker
        self._said: queue.Queue[Said | None] = queue.Queue()
        self._over = threading.Event()
        self._input, self._output = os.pipe()
        self._writing = threading.Lock()

    def start(
        self, children: Children, argv: Sequence[str], environ: dict[str, str], read: Reader
    ) -> None:
        """Start the program; `read` turns one of its lines into what it says."""
        run = (children, argv, environ, read)
        threading.Thread(target=self._run, args=run, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def listen(self) -> Iterator[Said]:
        """Yield what the program says, until it has ended."""
        while (said := self._said.get()) is not None:
            yield said
        self._said.put(None)  # whoever listens next is to know it too

    def tell(self, said: Said) -> None:
        """Say something to the program; one that has ended hears nothing."""
        with self._writing:
            if self._output >= 0:
                try:
                    os.write(self._output, json.dumps(said).encode("ascii") + b"\n")
                except OSError:
                    self._hang_up("the model's program has ended")

    def end(self, why: str) -> None:
        """Let the model go; its program ends as soon as it hears that nobody talks any more."""
        with self._writing:
            self._hang_up(why)

    def _hang_up(self, why: str) -> None:
        self.ended = self.ended or why
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    def _run(
        self, children: Children, argv: Sequence[str], environ: dict[str, str], read: Reader
    ) -> None:
        def hear(line: str) -> None:
            said = read(line)
            if said.get("kind") == "ended":
                self.end(str(said.get("message", "")))
            elif said:
                self._said.put(said)

        why = "the model's program has ended"
        try:
            code, lines = children.run(argv, environ=environ, on_line=hear, stdin=self._input)
            if code and not self.ended:
                why = f"the model's program failed: {lines[-1][:400] if lines else code}"
        except ExpectedError as error:
            why = error.message
        finally:
            os.close(self._input)
            self.end(why)
            self._over.set()
            self._said.put(None)

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            taker = None if self.ended else self._find_taker()
            if taker is not None:
                self.end(f"{taker} has taken the GPU")
