"""Run a function in a process of its own, and get what it reports line by line.

Each engine starts with an empty card and without what another one has imported or patched. On PCs
without a GPU the process is a fork that has the slow imports already.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.agents.trainer.ranks import start

Report = dict[str, Any]
Emit = Callable[[Report], None]


def run_fresh(
    function: Callable[..., None], *args: Any, limit_s: float = 300.0
) -> Iterator[Report]:
    """Call `function(emit, *args)` in a fresh process; yield each report as soon as it is there.

    An exception, a crash and a process that says nothing for `limit_s` seconds are reported, too,
    as `{"error": text}`.
    """
    reader, writer = multiprocessing.Pipe(duplex=False)
    process = start(_call, writer, function, args)
    writer.close()
    try:
        while True:
            if not reader.poll(limit_s):
                yield {"error": f"it reported nothing for {limit_s:.0f} s"}
                return
            report = reader.recv()
            if report is None:
                return
            yield report
            if "error" in report:
                return
    except EOFError:
        process.join()
        yield {"error": f"its process ended with exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()
        reader.close()


def _call(writer: Any, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Be the process: a folder of its own takes what libraries write beside them."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as place:
        os.chdir(place)
        warnings.filterwarnings("ignore")
        try:
            function(writer.send, *args)
        except BaseException as error:  # noqa: BLE001 - the parent prints it and goes on
            last = traceback.format_exc().strip()[-1500:]
            writer.send({"error": f"{type(error).__name__}: {str(error)[:300]}", "trace": last})
        else:
            writer.send(None)
        os.chdir("/")
    os._exit(0)  # threads of libraries must not keep it


def first_line(report: Report) -> str:
    """Return the error of a report in one line."""
    return " ".join(str(report.get("error", "")).split())[:400]
