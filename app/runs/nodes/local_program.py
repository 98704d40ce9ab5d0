"""Run a program of the training environment on this PC, in a separate process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.json_text import read_said
from agents.shared.files.python_child import python_environ, same_source
from app.errors import UserError
from app.hub.token_keyring import environ_with_token
from app.progress import OnMessage


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """End of a program."""

    code: int
    """Exit code; negative for the signal that ended it."""
    report: bytes
    """Content of its report file; empty if it wrote none."""
    failed: dict[str, Any] | None
    """Its last line of kind `failed`, or None."""
    last_error: str
    """Last line on stderr."""


async def run_program(module: str, job: dict[str, Any], home: Path, report: OnMessage) -> Ended:
    """Run `agents.program MODULE JOB REPORT` with our own Python and the hub's token.

    Args:
        module: name of the module.
        job: job of the program, as plain values.
        home: folder of this master.
        report: callback with the message of each line of kind `progress`.

    Raises:
        UserError: this PC cannot start it.
    """
    with tempfile.TemporaryDirectory(prefix="rackless-program-") as name:
        folder = Path(name)
        await asyncio.to_thread((folder / "job.json").write_text, json.dumps(job), "ascii")
        lines: list[dict[str, Any]] = []
        async with _started(module, folder, home) as process:
            assert process.stdout is not None
            async for line in process.stdout:
                lines.append(read_said(line))
                if lines[-1].get("kind") == "progress":
                    report(str(lines[-1].get("message", "")))
            code = await process.wait()
        errors = (folder / "stderr").read_text("utf-8", "replace").strip()
        written = folder / "report.json"
        return Ended(
            code=code,
            report=await asyncio.to_thread(written.read_bytes) if written.exists() else b"",
            failed=next((one for one in reversed(lines) if one.get("kind") == "failed"), None),
            last_error=errors.rpartition("\n")[2][:400],
        )


def program_environ(home: Path) -> dict[str, str]:
    """Return the environment of a program of the training environment on this PC."""
    # Absolute, since the program works in another folder.
    place = {"RACKLESS_AGENT_HOME": str(home.absolute())}
    return {**python_environ(environ_with_token(home), *same_source()), **place}


@contextlib.asynccontextmanager
async def _started(
    module: str, folder: Path, home: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the program inside the block; kill it at the end of the block."""
    # Libraries log to stderr, which goes to a file so that it cannot break one of our lines.
    with (folder / "stderr").open("wb") as errors:
        environ = await asyncio.to_thread(program_environ, home)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "agents.program", module),
                *(str(folder / "job.json"), str(folder / "report.json")),
                env=environ,
                cwd=folder,
                # asyncio's default limit of 64 KiB per line would break the loop over a longer one.
                limit=1 << 20,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
            )
        except OSError as error:  # no memory, or too many processes
            raise UserError(
                f"this PC could not start a program: {error.strerror or error}",
                "Close other programs, then try again.",
            ) from error
    try:
        yield process
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
