"""Each method's own implementation, called as its documentation does; nothing of ours is imported.

    PYTHON -I reference_quantizers.py awq|autoawq|autoawq-released|gptq:4-bit|gptq:8-bit JOB.json

The job has `model`, `folder`, `rows` (token ids) and `group`; `device` and `cap_gib`, what it may
take of a GPU, are for gptqmodel alone; what it took is in `took.json`. `autoawq` is the released
package, with the one line of its source mended that on a CPU keeps no copy of the weights.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

FAULT = "org_sd = {k: v.cpu() for k, v in module2inspect.state_dict().items()}"
MENDED = "org_sd = {k: v.cpu().clone() for k, v in module2inspect.state_dict().items()}"
LEAST_CORES = 8


def make_gptqmodel(case: str, job: dict[str, Any]) -> None:
    if (os.cpu_count() or 1) < LEAST_CORES:  # it refuses pools of one thread
        os.cpu_count = lambda: LEAST_CORES
    import torch
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    device = job.get("device", "cpu")
    if job.get("cap_gib"):
        _take_at_most(int(job["cap_gib"] * 2**30))
    started = time.monotonic()
    if case == "awq":
        backend = BACKEND.AWQ_TORCH  # the others need CUDA
        config = QuantizeConfig(
            bits=4, group_size=job["group"], sym=False, quant_method="awq", format="gemm"
        )
    else:
        backend = BACKEND.AUTO
        config = QuantizeConfig(bits=int(case.partition(":")[2][0]), group_size=job["group"])
    model = GPTQModel.load(job["model"], config, backend=backend, device=device)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in job["rows"]],
                   batch_size=8, backend=backend)  # fmt: skip
    quantized = time.monotonic()
    model.save(job["folder"])
    took = {"quantize_s": quantized - started, "save_s": time.monotonic() - quantized}
    if device != "cpu":
        took["vram_bytes"] = torch.cuda.max_memory_allocated()
    (Path(job["folder"]) / "took.json").write_text(json.dumps(took))


def _take_at_most(cap_bytes: int) -> None:
    """Leave so much of the GPU as a smaller card would have."""
    import torch

    torch.cuda.set_per_process_memory_fraction(cap_bytes / torch.cuda.mem_get_info()[1])
    torch.cuda.mem_get_info = lambda *_: (cap_bytes - torch.cuda.memory_reserved(), cap_bytes)


def make_autoawq(case: str, job: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    if case == "autoawq":
        _mend()
    from awq import AutoAWQForCausalLM
    from transformers import AutoTokenizer

    model = AutoAWQForCausalLM.from_pretrained(job["model"], device_map="cpu")
    joined = [token for row in job["rows"] for token in row]
    blocks = [joined[at : at + 512] for at in range(0, len(joined) - 511, 512)]
    model.quantize(
        AutoTokenizer.from_pretrained(job["model"]),
        quant_config={"zero_point": True, "q_group_size": job["group"], "w_bit": 4,
                      "version": "GEMM"},
        calib_data=blocks,
        max_calib_samples=len(blocks),
        max_calib_seq_len=512,
    )  # fmt: skip
    model.save_quantized(job["folder"])


def _mend() -> None:
    """Let AutoAWQ use its own source with the faulty line replaced."""
    from awq.models import base
    from awq.quantize import quantizer

    source = Path(str(quantizer.__file__)).read_text(encoding="utf-8")
    assert source.count(FAULT) == 1
    exec(compile(source.replace(FAULT, MENDED), str(quantizer.__file__), "exec"), vars(quantizer))
    mended = quantizer.AwqQuantizer._compute_best_scale
    base.AwqQuantizer._compute_best_scale = mended  # the first class is a default argument there


if __name__ == "__main__":
    asked, path = sys.argv[1:]
    told = json.loads(Path(path).read_bytes())
    (make_autoawq if asked.startswith("autoawq") else make_gptqmodel)(asked, told)
