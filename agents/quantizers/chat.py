"""Keep a model loaded for a chat: `agents.program agents.quantizers.chat JOB.json`.

Turns arrive on stdin as JSON lines (`ask` with a turn, `stop`), and each answer is streamed to
stdout. The end of stdin ends the program immediately, in any state, since its parent is gone.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from agents.contract.requests.chats import ChatJob, ChatTurn
from agents.contract.wire import WireError, from_wire, to_wire
from agents.errors import ExpectedError
from agents.quantizers.generation import Speaker, load_speaker
from agents.quantizers.job.job import JobProgress, locate, read_plain, run_job


class Inbox:
    """Messages from stdin, read by a separate thread, so that an answer can be stopped."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._turns: queue.Queue[ChatTurn] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, idle_s: float) -> ChatTurn | None:
        """Return the next turn, or None if none arrives in time."""
        try:
            return self._turns.get(timeout=idle_s)
        except queue.Empty:
            return None

    def _read(self) -> None:
        rest = b""
        while block := os.read(0, 1 << 16):
            # A read may end within a line, whose beginning is kept for the next read.
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        os._exit(0)

    def _take(self, said: dict[str, Any]) -> None:
        if said.get("kind") == "ask":
            # Not in `converse`: a stop that directly follows the question must not be lost.
            self.stopped.clear()
            self._turns.put(from_wire(ChatTurn, said["turn"], "turn"))
        elif said.get("kind") == "stop":
            self.stopped.set()


def converse(speaker: Speaker, inbox: Inbox, idle_s: float, progress: JobProgress) -> None:
    """Answer turns until none arrives for a while."""
    while (turn := inbox.next(idle_s)) is not None:
        try:
            found = speaker.answer(turn, lambda text: progress.say("piece", message=text), inbox)
        except ExpectedError as error:
            # Only this turn failed; the model stays loaded for the next one.
            progress.fail(error.message, error.hint)
        else:
            progress.say("answer", **to_wire(found))
    minutes = f"{idle_s / 60:.0f} minutes" if idle_s >= 60 else f"{idle_s:g} seconds"
    progress.say("ended", message=f"nothing was asked for {minutes}")


def read_job(path: Path) -> tuple[ChatJob, str]:
    """Return the job with absolute paths, and the device for the model.

    Raises:
        ExpectedError: the file is not a chat job.
    """
    plain, home = read_plain(path, "chat")
    try:
        job = from_wire(ChatJob, plain, "job")
    except (WireError, ValueError) as error:
        raise ExpectedError(f"{path} is not a chat job: {error}.", "Ask again") from error
    checkpoint = str(home / job.checkpoint) if job.checkpoint else None
    job = replace(job, model=locate(home, job.model), checkpoint=checkpoint)
    return job, str(plain.get("device", "cpu"))


def main(argv: list[str]) -> NoReturn:
    """Hold one chat and end this process, since llama.cpp's threads do not always end."""

    def work(path: Path, progress: JobProgress) -> None:
        job, device = read_job(path)
        inbox = Inbox()
        speaker = load_speaker(job, device)
        progress.say("opened", load_s=speaker.load_s, runtime=speaker.runtime)
        converse(speaker, inbox, job.idle_s, progress)

    usage = "python -m agents.program agents.quantizers.chat JOB.json"
    code = run_job(argv, usage, work)
    sys.stderr.flush()
    os._exit(code)
