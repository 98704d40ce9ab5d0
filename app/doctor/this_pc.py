"""Parts about this PC: versions, system, files, settings, faults. They need no store that works."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import locale
import os
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.doctor.part import ReportPart, absent_part, json_part, keep_end, problem_part
from app.paths import Paths

PACKAGES = (
    *("rackless", "PySide6_Essentials", "shiboken6", "numpy", "asyncssh"),
    *("cryptography", "pydantic", "PyYAML", "platformdirs", "jinja2", "huggingface_hub"),
    *("keyring", "rich", "nvidia-ml-py", "torch", "transformers", "peft", "bitsandbytes"),
)
VARIABLES = (
    *("RACKLESS_HOME", "RACKLESS_AGENT_HOME", "DISPLAY", "WAYLAND_DISPLAY", "XDG_SESSION_TYPE"),
    *("XDG_CURRENT_DESKTOP", "QT_QPA_PLATFORM", "QT_SCALE_FACTOR", "LANG", "LC_ALL", "SHELL"),
    *("HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE", "SSH_AUTH_SOCK", "WSL_DISTRO_NAME"),
    *("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "CUDA_VISIBLE_DEVICES"),
)
"""Variables that change what Rackless does; no others are read."""
WINDOW_LIBRARIES = (
    *("xcb", "xcb-cursor", "xcb-icccm", "xcb-keysyms", "xkbcommon", "xkbcommon-x11", "EGL", "GL"),
    *("dbus-1", "fontconfig", "glib-2.0"),
)
"""Libraries of the system that Qt's window needs on Linux."""
MAX_FILES = 400
MAX_FAULTS = 20


def collect_this_pc(paths: Paths) -> Iterator[ReportPart]:
    """Yield the parts about this PC; what cannot be read is said in its place."""
    yield json_part("versions.json", "versions of Rackless, Python, Qt and packages", _versions())
    yield json_part("system.json", "this PC: system, memory, disk, display", _system(paths))
    yield json_part("files.json", "names, sizes and times of Rackless's own files", _files(paths))
    yield _file_part("settings.json", "settings", paths.settings_file)
    yield _file_part("nodes.json", "nodes as stored, without asking them", paths.nodes_file)
    yield _file_part("last-check.json", "rows of the last check", paths.last_check)
    faults = sorted(paths.reports.glob("fault-*.txt"))[-MAX_FAULTS:]
    for fault in faults:
        yield _file_part(f"faults/{fault.name}", "report of a fault of Rackless", fault)


def _versions() -> dict[str, Any]:
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "python": sys.version,
        "executable": sys.executable,
        "is_bundle": bool(getattr(sys, "frozen", False)),
        "packages": packages,
    }


def _system(paths: Paths) -> dict[str, Any]:
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "platform": platform.platform(),
        "system": _read_release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory": _read_memory(),
        "disk_of_home": _read_disk(paths.home),
        "home": str(paths.home),
        "encoding": [sys.getfilesystemencoding(), locale.getpreferredencoding(False)],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "window_libraries": {name: ctypes.util.find_library(name) for name in WINDOW_LIBRARIES},
    }


def _read_release() -> dict[str, str]:
    try:
        return platform.freedesktop_os_release()
    except OSError:  # Windows, or a system without that file
        return {"name": platform.system(), "release": platform.release()}


def _read_memory() -> list[str] | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # not Linux
        return None
    wanted = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    return [line for line in lines if line.startswith(wanted)]


def _read_disk(folder: Path) -> dict[str, int] | str:
    # A home that does not exist yet will be on the disk of the nearest folder above it.
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return str(error)
    return {"total_bytes": usage.total, "free_bytes": usage.free}


def _files(paths: Paths) -> list[dict[str, Any]] | str:
    """Return the entries at the top of the home, so that a damaged or missing file shows."""
    try:
        entries = sorted(os.scandir(paths.home), key=lambda entry: entry.name)[:MAX_FILES]
    except OSError as error:
        return f"{paths.home} cannot be read: {error.strerror}"
    found: list[dict[str, Any]] = []
    for entry in entries:
        try:
            state = entry.stat(follow_symlinks=False)
        except OSError as error:
            found.append({"name": entry.name, "problem": str(error.strerror)})
            continue
        changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.st_mtime))
        mode = f"{state.st_mode:o}"
        found.append({"name": entry.name, "bytes": state.st_size, "mode": mode, "changed": changed})
    return found


def _file_part(name: str, what: str, path: Path) -> ReportPart:
    # A link could lead to any file of this user.
    if path.is_symlink():
        return problem_part(name, what, "it is a link, which is not followed")
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return absent_part(name, what)
    except OSError as error:
        return problem_part(name, what, error.strerror or str(error))
    return ReportPart(name=name, what=what, text=keep_end(text))
