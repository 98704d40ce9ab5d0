"""Read the state of NVIDIA's driver from the system, without loading its library.

The recorder lists the working GPUs (`agents/telemetry/gpu.py`); this explains why others do not.
"""

from __future__ import annotations

import glob
import os
import re

from agents.contract.requests.examination import DriverFacts
from agents.node.examination.reading import ask, list_folder, read_text

PCI_FOLDER = "/sys/bus/pci/devices"
NVIDIA_VENDOR = "0x10de"
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/wsl/lib",
)
SMI_TIMEOUT_S = 8.0
"""Maximum time for nvidia-smi to initialize an unused driver, in seconds."""
_MODULE = re.compile(r"Kernel Module\D*?(?:for \S+\s+)?(\d+(?:\.\d+)+)")
_LIBRARY = re.compile(r"libnvidia-ml\.so\.(\d+(?:\.\d+)+)$")


def read_driver() -> DriverFacts:
    """Return the state of NVIDIA's driver on this PC."""
    smi_message, persistence = _ask_smi()
    return DriverFacts(
        num_cards=count_cards(),
        module_version=parse_module_version(read_text("/proc/driver/nvidia/version") or ""),
        library_version=find_library_version(LIBRARIES),
        is_loaded=_has_module("nvidia"),
        nouveau=_has_module("nouveau"),
        devices_open=_try_devices("/dev/nvidia[0-9]*"),
        smi_message=smi_message,
        persistence=persistence,
        dxg=os.path.exists("/dev/dxg"),
    )


def count_cards(folder: str = PCI_FOLDER) -> int | None:
    """Return the number of NVIDIA display adapters on the PCI bus, or None if it is unreadable."""
    names = list_folder(folder)
    if names is None:
        return None
    cards = 0
    for name in names:
        is_ours = read_text(f"{folder}/{name}/vendor") == NVIDIA_VENDOR
        # Class 03 is a display controller; audio and USB of the same card have other classes.
        cards += is_ours and (read_text(f"{folder}/{name}/class") or "").startswith("0x03")
    return cards


def parse_module_version(text: str) -> str | None:
    """Return the version in /proc/driver/nvidia/version.

    >>> parse_module_version("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun")
    '580.65.06'
    >>> parse_module_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15 R")
    '570.86.15'
    """
    match = _MODULE.search(text)
    return match[1] if match else None


def find_library_version(folders: tuple[str, ...]) -> str | None:
    """Return the version in the name of NVIDIA's management library on disk."""
    for folder in folders:
        # The file itself; links to it end in `.so.1` and `.so`.
        for path in sorted(glob.glob(f"{folder}/libnvidia-ml.so.*.*")):
            match = _LIBRARY.search(path)
            if match:
                return match[1]
    return None


def _has_module(name: str) -> bool | None:
    # A container may have no /sys; then the module is unknown, not missing.
    return os.path.isdir(f"/sys/module/{name}") if os.path.isdir("/sys/module") else None


def _try_devices(pattern: str) -> bool | None:
    devices = glob.glob(pattern)
    if not devices:
        return None
    return all(os.access(device, os.R_OK | os.W_OK) for device in devices)


def _ask_smi() -> tuple[str | None, bool | None]:
    """Return the error message of nvidia-smi, and whether all GPUs are in persistence mode."""
    query = ["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader"]
    answer = ask(query, SMI_TIMEOUT_S)
    if answer is None:
        return None, None
    if answer.code:
        # nvidia-smi prints most of its errors to stdout.
        said = (answer.problem or answer.output).splitlines()
        return (said[0][:300] if said else f"exit code {answer.code}"), None
    return "", parse_persistence(answer.output)


def parse_persistence(text: str) -> bool | None:
    """Return whether all GPUs are in persistence mode, or None if nvidia-smi does not report it.

    >>> [parse_persistence(t) for t in ("Enabled\\nDisabled\\n", "Enabled\\n", "[N/A]\\n")]
    [False, True, None]
    """
    states = set(text.split())
    return "Disabled" not in states if states and states <= {"Enabled", "Disabled"} else None
