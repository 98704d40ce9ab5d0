"""Send samples of the sensors: first the recent ones that the master lacks, then each new one."""

from __future__ import annotations

import threading
from typing import Any

from agents.contract.requests.telemetry import FollowSamples
from agents.serve.channel import Call
from agents.serve.handlers import handles
from agents.telemetry.ring import RingReader

# Short, so that a chart shows a sample at once; only used while one is due.
POLL_S = 0.05
QUIET_S = 0.85
"""Minimum time from one sample to the next, in seconds."""
MISSES_BEFORE_REOPENING = 40


@handles(FollowSamples)
def follow(call: Call, request: FollowSamples) -> None:
    """Send `telemetry.sample` events after `after_s` (node's clock); None: only new samples."""
    ended = threading.Event()
    call.follows[call.request.id] = ended
    call.afterwards.append(lambda: _follow(call, request.after_s, ended))


def _follow(call: Call, after_s: float | None, ended: threading.Event) -> None:
    reader = RingReader(call.home.telemetry / "samples")
    try:
        sent = _replay(call, reader, after_s)
        misses = 0
        while not ended.is_set() and not call.channel.broken.is_set():
            newest = reader.read_newest_seq()
            if newest == sent:
                misses += 1
                if misses % MISSES_BEFORE_REOPENING == 0:  # a new recorder replaces the file
                    reader.close()
                ended.wait(POLL_S)
                continue
            # A new recorder may count from 0 again; after a gap, only the last minute is sent.
            for seq in range(max(sent + 1, newest - 60) if newest > sent else newest, newest + 1):
                _send(call, reader.read(seq))
            sent, misses = newest, 0
            # No need to poll before the next sample is due; then poll quickly, to send it at once.
            ended.wait(QUIET_S)
    finally:
        reader.close()
        call.follows.pop(call.request.id, None)


def _replay(call: Call, reader: RingReader, after_s: float | None) -> int:
    newest = reader.read_newest_seq()
    if after_s is not None:
        for sample in reader.read_since(after_s):
            _send(call, sample)
            newest = sample["seq"]
    return newest


def _send(call: Call, sample: dict[str, Any] | None) -> None:
    if sample is not None:
        call.emit("telemetry.sample", sample)
