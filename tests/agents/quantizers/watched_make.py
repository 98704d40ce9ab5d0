"""The job of a node, which leaves beside itself by what inputs gptqmodel has searched AWQ's scales.

python -m agents.program tests.agents.quantizers.watched_make JOB.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agents.quantizers import make
from agents.quantizers.formats.by_gptqmodel import let_few_cores_work

SEARCHED_FILE = "searched.jsonl"
"""A line with the shape of each search's inputs: blocks, tokens, width."""


def main(argv: list[str]) -> int:
    job = Path(argv[0])
    let_few_cores_work()
    from gptqmodel.looper.awq_processor import AWQProcessor

    search = AWQProcessor._compute_best_scale

    def tell(self: Any, x: Any, *rest: Any, **more: Any) -> Any:
        with job.with_name(SEARCHED_FILE).open("a") as file:
            file.write(json.dumps(list(x.shape)) + "\n")
        return search(self, x, *rest, **more)

    AWQProcessor._compute_best_scale = tell
    return make.main(argv)
