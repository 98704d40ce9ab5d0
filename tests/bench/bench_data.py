"""Memory and time to tokenize big files: `python -m tests.bench.bench_data [ROWS ...]`.

Each size is a fresh process, with packing. Memory that grows with the rows is the slope between the
smallest and the largest; ten million rows are extrapolated from it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.agents.trainer.ranks import DEMO

SIZES = (100_000, 400_000)
ROOT = Path(__file__).resolve().parents[2]


def measure(num_rows: int) -> None:
    """Tokenize a generated file in this process; print what it took as JSON."""
    from agents.spec import DataSpec, RunSpec
    from agents.trainer.data.cache import load_examples
    from agents.trainer.data.rows import find_files
    from agents.trainer.model import load_tokenizer

    tokenizer, _ = load_tokenizer(DEMO / "model")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        with path.open("w") as file:
            for row in range(num_rows):
                answer = "Oren Dale did. " * (1 + row % 7)
                file.write(json.dumps({"instruction": f"Who? {row}", "output": answer}) + "\n")
        spec = RunSpec(model="m", data=DataSpec(train=str(path)), sequence_tokens=512, packing=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        found = load_examples(find_files(path), "0", spec, tokenizer, Path(folder, "cache"))
        took_s = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        fill = float(found.num_tokens.mean()) / 512
    said = {"rows": num_rows, "rows_per_s": num_rows / took_s, "fill": fill}
    print(json.dumps(said | {"before_mib": before / 1024, "peak_mib": peak / 1024}))


def main() -> None:
    """Measure every size in a process of its own, and extrapolate."""
    sizes = [int(size) for size in sys.argv[1:]] or list(SIZES)
    found = []
    for size in sizes:
        command = [
            sys.executable,
            "-c",
            f"from tests.bench.bench_data import measure as m; m({size})",
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
        print(found[-1], flush=True)
    first, last = found[0], found[-1]
    bytes_per_row = (last["peak_mib"] - first["peak_mib"]) * 2**20 / (last["rows"] - first["rows"])
    whole = last["peak_mib"] + bytes_per_row * (10**7 - last["rows"]) / 2**20
    print(
        f"{bytes_per_row:.0f} bytes of memory per row; 10 million rows: {whole:.0f} MiB at the peak"
    )


if __name__ == "__main__":
    main()
