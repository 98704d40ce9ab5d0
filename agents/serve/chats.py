"""Keep a model loaded for a chat: its program, its output, and the reason of its end.

The program is a child of this connection and ends with it. It also ends by itself when idle, and is
ended here if a run or an export leases its GPU. A chat takes no lease, so that runs and exports can
start at once; it polls the lease instead.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from agents.children import Children
from agents.errors import ExpectedError
from agents.shared.files.bounded_work import KILLS

LOOK_S = 0.5
"""Interval of checks for other work on the GPU, in seconds."""
Said = dict[str, Any]
Reader = Callable[[str], Said]


class Chat:
    """One loaded model. Only one thread at a time may ask and read from `listen`."""

    def __init__(
        self,
        find_taker: Callable[[], str | None],
        announce: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare a chat.

        Args:
            find_taker: returns the name of the work that leased its GPU, or None.
            announce: registers the chat as the work on its device while its program runs.
        """
        self._announce = announce
        self.asking = threading.Lock()
        self.ended = ""
        """Reason of its end; empty: it is still loaded."""
        self._find_taker = find_taker
        self._said: queue.Queue[Said | None] = queue.Queue()
        self._over = threading.Event()
        # A pipe of its own, since closing it is what ends the program.
        self._input, self._output = os.pipe()
        self._writing = threading.Lock()

    def start(
        self, children: Children, argv: Sequence[str], environ: dict[str, str], read: Reader
    ) -> None:
        """Start the program; `read` parses one line of its output."""
        run = (children, argv, environ, read)
        threading.Thread(target=self._run, args=run, daemon=True).start()
        # A lease is a file, whose changes do not wake a thread, so it is polled.
        threading.Thread(target=self._watch, daemon=True).start()

    def listen(self) -> Iterator[Said]:
        """Yield messages of the program until it ends."""
        while (said := self._said.get()) is not None:
            yield said
        self._said.put(None)  # so that the next listener ends, too

    def send(self, said: Said) -> None:
        """Send a message to the program, unless it has ended."""
        with self._writing:
            if self._output >= 0:
                try:
                    os.write(self._output, json.dumps(said).encode("ascii") + b"\n")
                except OSError:
                    self._hang_up("the model's program has ended")

    def end(self, why: str) -> None:
        """Unload the model; the program ends when its stdin closes."""
        with self._writing:
            self._hang_up(why)

    def _hang_up(self, why: str) -> None:
        # The first reason is the cause; later ones are consequences.
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
            with self._announce():
                code, lines = children.run(argv, environ=environ, on_line=hear, stdin=self._input)
            if -code in KILLS:
                why = KILLS[-code][0]
            elif code and not self.ended:
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
            # After its end nothing holds the GPU, so no taker has to be found.
            taker = None if self.ended else self._find_taker()
            if taker is not None:
                self.end(f"{taker} has taken the GPU")
