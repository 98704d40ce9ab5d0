"""Run a function in a process of its own, and get what it reports line by line.

Each engine starts with an empty card and without what another one has imported or patched. On PCs
without a GPU the process is a fork that has the slow imports already.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agents.trainer.rank.attempt import redirect_output
from tests.agents.trainer.ranks import start

Report = dict[str, Any]
T = TypeVar("T")
Emit = Callable[[Report], None]


class FreshProcess:
    """A process that imports what it will need, and calls `function(emit, *args)` once told to.

    So the imports of the next engine pass while another one is measured.

    Args:
        function: Of a module that does not import torch.
        args: Its arguments behind `emit`.
        warm: Modules to import at once; what fails to be imported is left to the function.
    """

    def __init__(self, function: Callable[..., None], *args: Any, warm: Sequence[str] = ()) -> None:
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        told, self._tell = multiprocessing.Pipe(duplex=False)
        # What libraries print would hide the figures.
        self._log = tempfile.NamedTemporaryFile(prefix="rackless-bench-")  # noqa: SIM115
        self._process = start(_call, writer, told, self._log.name, tuple(warm), function, args)
        writer.close()
        told.close()

    def reports(self, limit_s: float = 300.0) -> Iterator[Report]:
        """Begin, and yield each report as soon as it is there.

        An exception, a crash and a process that says nothing for `limit_s` seconds are reported,
        too, as `{"error": text}`.
        """
        try:
            self._tell.send(True)
            while True:
                if not self._reader.poll(limit_s):
                    yield {"error": f"it reported nothing for {limit_s:.0f} s"}
                    return
                report = self._reader.recv()
                if report is None:
                    return
                yield report
                if "error" in report:
                    return
        except (EOFError, BrokenPipeError):
            self._process.join()
            said = self._log.read().decode(errors="replace").strip()[-300:]
            code = self._process.exitcode
            yield {"error": f"its process ended with exit code {code}: {said}"}
        finally:
            self._process.kill()
            self._process.join()
            self._reader.close()
            self._tell.close()
            self._log.close()


def run_fresh(
    function: Callable[..., None], *args: Any, limit_s: float = 300.0
) -> Iterator[Report]:
    """Call `function(emit, *args)` in a fresh process and yield its reports."""
    yield from FreshProcess(function, *args).reports(limit_s)


def run_ahead(processes: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Yield processes in order, each of which was started before the one ahead of it is used."""
    ready: T | None = None
    for begin in processes:
        current, ready = ready, begin()
        if current is not None:
            yield current
    if ready is not None:
        yield ready


def _call(
    writer: Any, told: Any, log: str, warm: Sequence[str], function: Callable[..., None], args: Any
) -> None:
    """Be the process: a folder of its own takes what libraries write beside them."""
    redirect_output(Path(log))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    paths = (str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", ""))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory(prefix="rackless-bench-") as place:
        os.chdir(place)
        warnings.filterwarnings("ignore")
        try:
            for name in warm:
                with contextlib.suppress(Exception):  # the function says what is missing
                    importlib.import_module(name)
            told.recv()
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
