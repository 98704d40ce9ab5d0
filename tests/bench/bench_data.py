"""Memory and time to tokenize big files: `python -m tests.bench.bench_data [--million] [ROWS ...]`.

Each size is a fresh process, with packing. Memory that grows with the rows is the slope between the
smallest and the largest; ten million rows are extrapolated from it. The peak counts pages of mapped
files, which the system takes back when it needs them; `anonymous` is what the process itself holds
at the end. With `--million` a million rows are measured, too (some minutes, 400 MB of disk), and
the data is opened and read once in the order of a training, as a run does.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.agents.trainer.ranks import DEMO

SIZES = (100_000, 400_000)
MILLION = 1_000_000
# Examples that are read back.
_READ = 20_000
ROOT = Path(__file__).resolve().parents[2]


def measure(num_rows: int) -> None:
    """Tokenize a generated file in this process; print what it took as JSON."""
    from agents.contract.spec import DataSpec, RunSpec
    from agents.trainer.data.cache import load_examples
    from agents.trainer.data.order import shuffle_epoch
    from agents.trainer.data.rows import find_files
    from agents.trainer.model.model import load_tokenizer

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
        anonymous = read_anonymous_mib()
        started = time.perf_counter()
        order = shuffle_epoch(7, 0, len(found))[:_READ]
        num_tokens = sum(found[int(place)].num_tokens for place in order)
        read_s = time.perf_counter() - started
    print(json.dumps({
        "rows": num_rows, "seconds": round(took_s, 1), "rows_per_s": round(num_rows / took_s),
        "fill": round(fill, 4), "before_mib": before // 1024, "peak_mib": peak // 1024,
        "anonymous_mib": anonymous, "examples_read_per_s": round(len(order) / read_s),
        "tokens_read_per_s": round(num_tokens / read_s),
    }))  # fmt: skip


def read_anonymous_mib() -> int:
    """Return the memory of this process that is no page of a file."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) // 1024


def main() -> None:
    """Measure every size in a process of its own, and extrapolate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("rows", nargs="*", type=int, default=list(SIZES))
    parser.add_argument("--million", action="store_true", help="measure 1,000,000 rows, too")
    args = parser.parse_args()
    sizes = [*args.rows, *([MILLION] if args.million else [])]
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
