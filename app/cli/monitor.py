"""`rackless monitor`: live readings of all nodes, until interrupted."""

from __future__ import annotations

import argparse

from agents.contract.node import Sample
from app.cli.kit.command import with_core
from app.cli.kit.output import Output, aligned, plain
from app.core.action import CoreApi
from app.core.nodes import ConnectNodes, ListNodes
from app.errors import UserError
from app.events import SampleArrived
from app.text import DASH, show_bytes_of, show_celsius, show_share, show_watts

_HEAD = ["NODE", "DEVICE", "BUSY", "MEMORY", "TEMP", "POWER", "CLOCK", "FAN"]
# Cursor home, then erase below: without the flicker of erasing the whole screen first.
_CLEAR = "\x1b[H\x1b[J"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_monitor))


async def _monitor(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    if not await core.do(ListNodes()):
        raise UserError("there are no nodes yet", "Add one: rackless nodes add NAME --local")
    newest: dict[str, Sample] = {}
    # Subscribed before connecting, or the first samples would be lost.
    stream = core.events.stream()
    await core.do(ConnectNodes())
    async for arrived in stream:
        if not isinstance(arrived, SampleArrived) or arrived.replayed:
            continue
        newest[arrived.node] = arrived.sample
        if out.as_json:
            out.line({"node": arrived.node, **plain(arrived.sample)})
        elif out.is_terminal:
            # Sorted, so that a node keeps its place in any order of samples.
            lines = aligned([_HEAD, *(r for n, s in sorted(newest.items()) for r in _rows(n, s))])
            out.text(_CLEAR + "\n".join(lines))
        else:
            _print_plain(out, arrived)
    return 0


def _print_plain(out: Output, arrived: SampleArrived) -> None:
    for row in _rows(arrived.node, arrived.sample):
        out.text("  ".join(row))


def _rows(node: str, sample: Sample) -> list[list[str]]:
    rows = [
        [
            node,
            f"{gpu.index} {gpu.name}",
            show_share(gpu.utilisation),
            show_bytes_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
            show_celsius(gpu.temperature_celsius),
            show_watts(gpu.power_w),
            DASH if gpu.clock_mhz is None else f"{gpu.clock_mhz:.0f} MHz",
            show_share(gpu.fan),
        ]
        for gpu in sample.gpus
    ]
    host = [
        node,
        "cpu",
        show_share(sample.cpu_utilisation),
        show_bytes_of(sample.memory_used_bytes, sample.memory_total_bytes),
        show_celsius(sample.cpu_temperature_celsius),
        show_watts(sample.cpu_power_w),
        DASH,  # no sensor of a CPU's clock or fan is sampled
        DASH,
    ]
    return [*rows, host]
