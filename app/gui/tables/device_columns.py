"""Columns of the overview as a table: the same figures as on its cards."""

from __future__ import annotations

from dataclasses import dataclass

from app.events import NodeSnapshot
from app.gui.tables.rows_model import Column, number_column, unknown_first
from app.telemetry.alerts import share_of
from app.telemetry.state import Status, describe_device, is_current
from app.telemetry.stream import Device, DeviceKey, StreamReading
from app.text import (
    short_card,
    show_bytes_of,
    show_celsius,
    show_number,
    show_share,
    show_watts,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRow:
    key: DeviceKey
    status: Status
    reading: StreamReading
    is_live: bool
    """True if the figures are current; others are not shown."""


def make_row(device: Device, node: NodeSnapshot, now_s: float) -> DeviceRow:
    """Return the table row of a device."""
    return DeviceRow(
        key=device.key,
        status=describe_device(device, node, now_s),
        reading=device.reading,
        is_live=is_current(device, node, now_s),
    )


def name_place(device: str) -> str:
    """Return `GPU 0` for `cuda:0`."""
    return device.replace("cuda:", "GPU ").replace("cpu", "CPU")


def _figure(row: DeviceRow, name: str) -> float | None:
    value: float | None = getattr(row.reading, name)
    return value if row.is_live else None


def _used(row: DeviceRow) -> int | None:
    return row.reading.memory_used_bytes if row.is_live else None


def device_columns() -> list[Column[DeviceRow]]:
    # Widths leave some 200 px for the state in a window of 1280 px: it is the column to read first.
    return [
        Column(title="Node", text=lambda r: r.key.node, width_px=76),
        Column(title="Slot", text=lambda r: name_place(r.key.device), width_px=68),
        Column(title="Device", text=lambda r: short_card(r.reading.name), width_px=166),
        Column(
            title="State",
            text=lambda r: r.status.text,
            status=lambda r: r.status,
            stretches=True,
            tip="What the device is doing now",
        ),
        number_column(
            "Load",
            lambda r: _figure(r, "utilisation"),
            show_share,
            width_px=64,
            tip="Share of time the device was computing",
        ),
        Column(
            title="Memory",
            # Only the part in use goes out of date with the node; the total is hardware.
            text=lambda r: show_bytes_of(_used(r), r.reading.memory_total_bytes),
            # By share and not by bytes: how full a device is matters, not how large.
            sort=lambda r: unknown_first(share_of(_used(r), r.reading.memory_total_bytes)),
            is_number=True,
            width_px=124,
            tip="In use and total: VRAM of a GPU, or RAM of a PC that trains on its CPU",
        ),
        number_column(
            "Temp", lambda r: _figure(r, "temperature_celsius"), show_celsius, width_px=64
        ),
        number_column("Power", lambda r: _figure(r, "power_w"), show_watts, width_px=68),
        number_column(
            "MHz",
            lambda r: _figure(r, "clock_mhz"),
            show_number,
            width_px=66,
            tip="Clock rate of the GPU's cores",
        ),
        number_column(
            "Fan",
            lambda r: _figure(r, "fan"),
            show_share,
            width_px=62,
            tip="Fan speed as a share of its maximum",
        ),
        number_column(
            "Tokens/s",
            lambda r: _figure(r, "tokens_per_s"),
            show_number,
            width_px=80,
            tip="Tokens trained per second on this device",
        ),
    ]
