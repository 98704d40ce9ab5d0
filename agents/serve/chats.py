"""Keep a model loaded for a conversation: its program, its output, and why it ended.

The program is a child of this connection and ends with it. It also ends by itself when idle, and is
ended here when a run or an export leases its GPU. A chat takes no lease, so that those can start at
once; it polls the lease instead.
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
from agents.shared.files.bounded_work import KILLED, KILLED_MESSAGE

LOOK_S = 0.5
"""Interval of checks whether other work has leased the GPU, in seconds."""
Said = dict[str, Any]
Reader = Callable[[str], Said]


class Chat:
    """One loaded model. Only one thread at a time may ask and read from `listen`."""

    def __init__(
        self,
        find_taker: Callable[[], str | None],
        announce: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """Prepare it; `find_taker` returns the name of the work that leased its GPU, or None.

        `announce` names the chat as the work on its device, as long as its program runs.
        """
        self._announce = announce
        self.asking = threading.Lock()
        self.ended = ""
        """Reason of its end; empty: it has not ended."""
        self._find_taker = find_taker
        self._said: queue.Queue[Said | None] = queue.Queue()
        self._over = threading.Event()
        self._input, self._output = os.pipe()
        self._writing = threading.Lock()

    def start(
        self, children: Children, argv: Sequence[str], environ: dict[str, str], read: Reader
    ) -> None:
        """Start the program; `read` parses one line of its output."""
        run = (children, argv, environ, read)
        threading.Thread(target=self._run, args=run, daemon=True).start()
        # A lease is a file, which cannot be waited for, so it is polled on a thread of its own.
        threading.Thread(target=self._watch, daemon=True).start()

    def listen(self) -> Iterator[Said]:
        """Yield messages of the program until it ends."""
        while (said := self._said.get()) is not None:
            yield said
        self._said.put(None)  # for the next listener

    def send(self, said: Said) -> None:
        """Send a message to the program; does nothing if it has ended."""
        with self._writing:
            if self._output >= 0:
                try:
                    os.write(self._output, json.dumps(said).encode("ascii") + b"\n")
                except OSError:
                    self._hang_up("the model's program has ended")

    def end(self, why: str) -> None:
        """Unload the model; its program ends when its stdin closes."""
        with self._writing:
            self._hang_up(why)

    def _hang_up(self, why: str) -> None:
        # The first reason is the cause; the later ones follow from it.
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
            if code == -KILLED:
                why = KILLED_MESSAGE
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
            taker = None if self.ended else self._find_taker()
            if taker is not None:
                self.end(f"{taker} has taken the GPU")
