"""Seven processes on one GPU play seven cards: the memory of each stage of a 70B, and its bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from agents.contract.run import RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec
from tests.agents.trainer.ranks import Run, make_environ, make_spec
from tests.bench.random_stage import write_shape

ROOT = Path(__file__).parents[2]
SHAPE_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHAPE_TINY = {**SHAPE_70B, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 1024}  # fmt: skip
NUM_STEPS = 3
SHARED_GPU = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
"""With a host id each, ranks of NCCL take one GPU for several."""


def write_rows(path: Path, num_rows: int, num_words: int) -> None:
    """Write rows of text that are cut at the run's length."""
    text = " ".join(f"Brenford {number}" for number in range(num_words))
    path.write_text("".join(json.dumps({"text": f"{n} {text}"}) + "\n" for n in range(num_rows)))


def count_sent_bytes() -> int:
    """Return the bytes that loopback has carried."""
    return int(Path("/sys/class/net/lo/statistics/tx_bytes").read_text())


def run_stages(
    device: str, num_stages: int, num_layers: int, tokens: int, num_micro: int, cap_gib: float
) -> dict[str, Any]:
    """Train three steps; return peak memory of each stage, losses, and bytes by their forecast.

    Args:
        device: `cuda` for the 70B shape, `cpu` for a tiny one.
        num_stages: ranks.
        num_layers: of the model, at least one for each rank.
        tokens: of each sequence, and of each micro-batch.
        num_micro: sequences of a step.
        cap_gib: GPU memory of a rank.
    """
    shape = SHAPE_70B if device == "cuda" else SHAPE_TINY
    with tempfile.TemporaryDirectory(prefix="rackless-stages-") as folder:
        model = write_shape(Path(folder) / "model", {**shape, "num_hidden_layers": num_layers})
        spec = make_spec(
            adapter=AdapterSpec(kind="qlora", rank=16, targets=("q_proj", "k_proj", "v_proj",
                                                                "o_proj")),
            sequence_tokens=tokens, batch_sequences=num_micro, max_steps=NUM_STEPS,
            parallel="pipeline", recompute="all",
            memory_gib=cap_gib if device == "cuda" else None,
            checkpoint=CheckpointSpec(every_minutes=None, every_steps=None),
        )  # fmt: skip
        spec = replace(spec, data=replace(spec.data, format="text"))
        run = Run(Path(folder) / "run", model, spec, num_stages)
        write_rows(run.train, 2 * num_micro, tokens)
        placed = "cuda:0" if device == "cuda" else "cpu"
        ranks = tuple(
            RankPlacement(rank=rank, local_rank=rank, node="here", device=placed)
            for rank in range(num_stages)
        )
        intent = run.intend(ranks=ranks)
        path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        before = count_sent_bytes()
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.bench.random_stage"],
                env={
                    **os.environ, **make_environ(intent, rank, run.attempt_folder), **SHARED_GPU,
                    "NCCL_HOSTID": f"host{rank}", "PYTHONPATH": path,
                },
                cwd=ROOT,
            )
            for rank in range(num_stages)
        ]  # fmt: skip
        codes = [process.wait() for process in started]
        sent = count_sent_bytes() - before
        if any(codes):
            raise RuntimeError("\n".join(run.read_log(rank)[-1500:] for rank in range(num_stages)))
        steps = [run.steps(rank) for rank in range(num_stages)]
    width = shape["hidden_size"] * (2 if device == "cuda" else 4)
    # Features there, and gradients back, over each border.
    forecast = 2 * (num_stages - 1) * NUM_STEPS * num_micro * tokens * width
    return {
        "tokens": tokens,
        "peak_gib": [round(max(s["memory_bytes"] for s in one.values()) / 2**30, 2)
                     for one in steps],
        "loss": [line["loss"] for _, line in sorted(steps[0].items())],
        "step_s": [round(line["step_s"], 2) for _, line in sorted(steps[0].items())],
        "sent_mb": round(sent / 1e6, 1),
        "features_mb": round(forecast / 1e6, 1),
    }  # fmt: skip
