"""Resolve the versions and files of a lock's packages with uv, for all systems at once."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tomllib

from agents.shared.files.python_child import SAFE_FOLDER
from agents.shared.packages.package_index import IndexSettings
from app.provisioning.lock_text import COOLING_OFF

_POLL_S = 0.1


class Unreachable(Exception):
    """An index does not answer; the message names its host."""


class Unresolvable(Exception):
    """No versions of an index satisfy all requirements; the message is uv's explanation."""


class Stopped(Exception):
    """The caller has stopped the work."""


def resolve(
    uv: str,
    needs: Iterable[str],
    pins: Mapping[str, str],
    options: Sequence[str] = (),
    *,
    environ: Mapping[str, str],
    preferred: Mapping[str, str] | None = None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[dict[str, Any]]:
    """Return packages in PEP 751's form.

    Args:
        uv: path or name of the program.
        needs: requirements.
        pins: the only allowed version of each package, by name.
        options: additional options of `uv pip compile`.
        environ: all variables of uv's process, such as UV_INDEX.
        preferred: versions to prefer if several are allowed.
        is_stopped: called often; True stops the work.

    Raises:
        Unreachable: an index does not answer.
        Unresolvable: there is no solution.
        Stopped: `is_stopped` returned True.
        OSError: uv does not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted, constraints, found, said = (
            Path(folder, name) for name in ("in.txt", "pins.txt", "pylock.toml", "said")
        )
        wanted.write_text("".join(f"{need}\n" for need in needs), encoding="utf-8")
        constraints.write_text(
            "".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8"
        )
        if preferred:
            # uv prefers the versions of the file that it replaces.
            tables = (
                f'[[packages]]\nname = "{name}"\nversion = "{version}"\n'
                for name, version in preferred.items()
            )
            text = 'lock-version = "1.0"\ncreated-by = "rackless"\n' + "".join(tables)
            found.write_text(text, encoding="utf-8")
        argv = [uv, "--no-config", "--quiet", "pip", "compile", "--universal"]
        # Our own Python: otherwise uv runs one that it finds in the folder or in PATH, if any.
        argv += ["--python", sys.executable]
        argv += ["--python-version", "3.11", "--fork-strategy", "fewest"]
        argv += ["--constraints", str(constraints), *options]
        argv += ["--output-file", str(found), str(wanted)]
        with (
            said.open("wb") as stderr,
            subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**environ, "UV_NO_PROGRESS": "1"},
                # Without this flag the start flashes a console window on Windows.
                creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
                # uv starts Python, which must not import from the caller's folder.
                cwd=SAFE_FOLDER,
            ) as process,
        ):
            while _is_running(process):
                if is_stopped():
                    process.kill()
        if is_stopped():
            raise Stopped
        if process.returncode != 0:
            raise _explain(said.read_text("utf-8", errors="replace"))
        packages: list[dict[str, Any]] = tomllib.loads(found.read_text("utf-8"))["packages"]
        return packages


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_POLL_S)
        return False
    return True


def _explain(said: str) -> Unreachable | Unresolvable:
    lines = [re.sub(r"^\s*(error|cause|Caused by): ", "", one).strip() for one in said.splitlines()]
    # uv has one exit code for all errors; only its text distinguishes a network error from a
    # conflict.
    if re.search(r"dns error|error sending request|Failed to fetch", said):
        url = re.search(r"https?://[^\s`]+", said)
        host = urlsplit(url[0]).hostname if url else None
        return Unreachable(": ".join(filter(None, (host, lines[-1]))))
    reason = " ".join(one for one in lines if one).partition(" hint: ")[0]
    return Unresolvable(reason[:1000] or "uv failed without a reason")


def resolve_build(
    uv: str,
    need: str,
    settings: IndexSettings,
    given: Mapping[str, str],
    preferred: Mapping[str, str],
    is_stopped: Callable[[], bool],
) -> list[dict[str, Any]]:
    """Return the packages of a build of torch, from the configured indexes of pip.

    No release younger than `COOLING_OFF` is taken of packages that torch does not pin, unless no
    older one fits.

    Args:
        uv: path or name of the program.
        need: requirement of the build, such as `torch==2.13.0+cu126`.
        settings: configured indexes.
        given: versions that another lock installs; they are not in the result.
        preferred: versions to prefer if several are allowed.
        is_stopped: called often; True stops the work.

    Raises:
        Unreachable, Unresolvable, Stopped: see `resolve`.
    """
    # Indexes are asked in order, as pip's settings name them.
    options = ["--only-binary", ":all:", "--index-strategy", "unsafe-first-match"]
    options += [] if settings.indexes else ["--no-index"]
    with tempfile.TemporaryDirectory() as cache:
        environ = {**_variables(settings), "UV_CACHE_DIR": cache}

        def find(more: Sequence[str] = ()) -> list[dict[str, Any]]:
            found = resolve(
                uv,
                [need],
                given,
                [*options, *more],
                environ=environ,
                preferred=preferred,
                is_stopped=is_stopped,
            )
            return [one for one in found if one["name"] not in given]

        # One limit per young package: uv's own option for all would drop each file whose index has
        # no upload time, as PyTorch's.
        packages, tried = find(), {need.partition("==")[0]}
        while young := next((p for p in packages if p["name"] not in tried and _is_young(p)), None):
            tried.add(young["name"])
            limit = f"{young['name']}={(datetime.now(UTC) - COOLING_OFF).isoformat()}"
            with contextlib.suppress(Unresolvable):
                packages = find(["--exclude-newer-package", limit])
                options += ["--exclude-newer-package", limit]
        return packages


def _variables(settings: IndexSettings) -> dict[str, str]:
    """Return an environment in which uv uses only the indexes of some settings."""
    # In variables: other users of a PC can read the arguments of a process, and an address may
    # hold a password.
    # Without the user's own variables of uv, which may name other indexes.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UV_")}
    if settings.indexes:
        *first, environ["UV_DEFAULT_INDEX"] = settings.indexes
        environ["UV_INDEX"] = " ".join(first)
    if settings.certificates:
        environ["SSL_CERT_FILE"] = settings.certificates
    # Absolute, since uv runs in another folder.
    paths = (one if "://" in one else Path(one).expanduser().absolute() for one in settings.links)
    environ["UV_FIND_LINKS"] = ",".join(map(str, paths))
    environ["UV_SYSTEM_CERTS"] = "1"
    return environ


def _is_young(package: dict[str, Any]) -> bool:
    uploaded = [one["upload-time"] for one in package.get("wheels", ()) if "upload-time" in one]
    return any(datetime.now(UTC) - moment < COOLING_OFF for moment in uploaded)
