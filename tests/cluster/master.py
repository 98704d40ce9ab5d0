"""The `rackless` command as a person types it, inside the master's namespace of a cluster."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import Cluster

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a finished command."""

    code: int
    output: str
    problem: str
    """Text on stderr."""

    @property
    def document(self) -> Any:
        """The one JSON document on stdout."""
        return json.loads(self.output)


class Master:
    """One person's Rackless: a home of its own, used from the master's namespace."""

    def __init__(self, cluster: Cluster, home: Path) -> None:
        self.cluster = cluster
        self.home = home

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start `rackless ... --json`; the pid is that of the command itself."""
        return self._python("-m", "app", *arguments, "--json", **options)

    def script(self, path: Path, *arguments: str) -> subprocess.Popen[str]:
        """Start a Python file of the tests with this master's home."""
        return self._python(str(path), *arguments)

    def rackless(self, *arguments: str, timeout_s: float = 90.0) -> Answer:
        """Run `rackless ... --json` to its end, with any exit code."""
        with self.start(*arguments) as process:
            try:
                output, problem = process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            return Answer(process.returncode, output, problem)

    def answer(self, *arguments: str) -> Any:
        """Return the JSON document of a command that must succeed."""
        done = self.rackless(*arguments)
        assert done.code == 0, f"rackless {' '.join(arguments)}: {done.problem}"
        return done.document

    def _python(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        environ = {"RACKLESS_HOME": str(self.home), "PYTHONPATH": str(ROOT)}
        environ["HOME"] = str(self.cluster.master.home)
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.cluster.start(
            self.cluster.master,
            *(sys.executable, "-P", *arguments),
            env={**os.environ, **environ},
            **{"stdin": subprocess.DEVNULL, **settings, **options},
        )
