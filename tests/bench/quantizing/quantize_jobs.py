"""The jobs that nodes run to quantize, each in a process of its own with a limit to its time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.contract.formats import Engine
from agents.contract.requests.exports import PROOF_FILE, MakeJob, Origin, TextSource
from agents.contract.wire import to_wire
from agents.quantizers.job.reuse import LINEAGE_FILE
from agents.quantizers.job.texts import read_texts
from agents.trainer.data.tokenizer import load_tokenizer
from app.planning.shape.model_shape import read_shape

ROOT = Path(__file__).parents[3]
TARGETS = ("q_proj", "v_proj")
RANK = 16
# Lines of a job that failed, or whose time was over, which show where that went.
_LAST_SAID = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """What is asked for."""

    folder: Path
    device: str
    deadline_s: float
    out: Path | None
    tools: Path | None

    @property
    def is_tiny(self) -> bool:
        return self.device == "cpu"

    def tell(self, row: dict[str, Any]) -> None:
        """Print a row, and keep it."""
        line = json.dumps(row)
        print(line, flush=True)
        if self.out is not None:
            with self.out.open("a", encoding="ascii") as file:
                file.write(line + "\n")

    def run(
        self, case: str, argv: list[str], python: str | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Run a process until the time is over; return how it went and the JSON lines our own said.

        Args:
            case: names it.
            argv: after Python, which takes a module; with one's own `python`, all after that.
            python: another one.
        """
        left_s = self.deadline_s - time.monotonic()
        if left_s < 5:
            return {"case": case, "skipped": "no time left"}, []
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
            "GPTQMODEL_DISABLE_GPTQ_CUDA": "1",
            "GPTQMODEL_DISABLE_PACK_EXT": "1",
            "HF_HUB_OFFLINE": "1",
        }
        started = time.monotonic()
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [python, *argv] if python else [sys.executable, "-m", *argv],
                env=environ,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # so that those that it starts end with it
            )
            timer = threading.Timer(left_s, lambda: os.killpg(process.pid, signal.SIGKILL))
            timer.start()
            said = []
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(b"{") and not python:
                    said.append({**json.loads(line), "at_s": round(time.monotonic() - started, 1)})
            process.wait()
            timer.cancel()
            row = {"case": case, "rc": process.returncode, "seconds": time.monotonic() - started}
            if process.returncode:
                errors.seek(0)
                tail = errors.read().decode("utf-8", "replace").strip()[-1500:]
                row |= {"said": said[-_LAST_SAID:], "stderr": tail}
        return row, said


def make(
    bench: Bench,
    case: str,
    model: Path,
    method: Any,
    types: tuple[str, ...] = (),
    cap_gib: float | None = None,
    engine: Engine = "gptqmodel",
    keep: Path | None = None,
) -> dict[str, Any]:
    """Quantize a model by the job of a node; return what was measured beside what was forecast.

    Args:
        case: names it.
        model: folder of Transformers with `train.jsonl` and `eval.jsonl`.
        method: of `agents.contract.formats.METHODS`.
        types: of the method.
        cap_gib: of the GPU; None: all of it.
        engine: that makes AWQ.
        keep: where the result stays; None: it goes.
    """
    destination = keep or bench.folder / "made"
    job = MakeJob(
        python=sys.executable,
        model=str(model),
        method=method,
        destination=str(destination),
        origin=Origin(base=case, data="made up", run_id="r", run_name="bench", step=1),
        train=TextSource(path=str(model / "train.jsonl")),
        evaluation=TextSource(path=str(model / "eval.jsonl")),
        types=types,
        engine=engine,
        device=bench.device,
        tools=str(bench.tools or bench.folder / "tools"),
    )
    path = bench.folder / "job.json"
    path.write_text(json.dumps(to_wire(job)))
    lineage = {"content": hashlib.sha256(str(model).encode()).hexdigest()}
    (model / LINEAGE_FILE).write_text(json.dumps(lineage))  # as a merge leaves it
    argv = ["tests.bench.bench_quantize", "--child", "make", "--folder", str(path)]
    row, _ = bench.run(case, argv if cap_gib is None else [*argv, "--cap-gib", str(cap_gib)])
    row["cap_gib"] = cap_gib
    row |= {"method": method, "types": types, "engine": engine, **describe_input(model)}
    if row.get("rc") == 0:
        about = json.loads((destination / PROOF_FILE).read_bytes())
        row |= {"proofs": about["proofs"], "phases": about["measured"]["phases"]}
    for left in model.parent.glob(f".*-{model.name}-*"):  # else the next case had less to do
        shutil.rmtree(left)
    if keep is None:
        shutil.rmtree(destination, ignore_errors=True)
    return row


def describe_input(model: Path) -> dict[str, Any]:
    """Return what a forecast asks for: the configuration, and the tokens of each row."""
    tokenizer, _ = load_tokenizer(model)
    train, held_out = (TextSource(path=str(model / f"{name}.jsonl")) for name in ("train", "eval"))
    texts = read_texts(train, held_out, tokenizer)
    return {
        "config": json.loads((model / "config.json").read_bytes()),
        "calibration_tokens": list(map(len, texts.calibration)),
        "held_out_tokens": list(map(len, texts.held_out)),
    }


def merge(bench: Bench, case: str, model: Path) -> dict[str, Any]:
    """Merge a random adapter into a model by the job of a node."""
    home, destination = bench.folder / "home", bench.folder / "merged"
    write_adapter(model, home / "runs" / "r" / "checkpoints")
    job = {
        "run_id": "r",
        "step": 1,
        "model_path": str(model),
        "destination": str(destination),
        "agent_home": str(home),
    }
    path = bench.folder / "job.json"
    path.write_text(json.dumps(job))
    row, _ = bench.run(case, ["agents.program", "agents.quantizers.merge", str(path)])
    row |= {"method": "merged", "types": (), **describe_input(model)}
    if row.get("rc") == 0:
        about = json.loads((destination / "rackless.json").read_bytes())
        row["phases"] = about["measured"]["phases"]
        row["bytes"] = sum(one.stat().st_size for one in destination.glob("*.safetensors"))
    for gone in (destination, home):
        shutil.rmtree(gone, ignore_errors=True)
    return row


def write_adapter(model: Path, checkpoints: Path) -> None:
    """Commit a checkpoint with a small random adapter, as the trainer does."""
    import torch
    from peft import LoraConfig
    from safetensors.torch import save_file

    from agents.trainer.checkpoint.fingerprint import hash_model
    from agents.trainer.checkpoint.folder import CheckpointFolder
    from agents.trainer.rank.failpoints import Failpoints

    shape = read_shape(json.loads((model / "config.json").read_bytes()))

    def write(folder: Path) -> None:
        found = {}
        for place, layer in enumerate(shape.layers):
            for one in (one for one in layer.linears if one.name in TARGETS):
                stem = f"base_model.model.model.layers.{place}.self_attn.{one.name}"
                found[f"{stem}.lora_A.weight"] = torch.randn(RANK, one.num_inputs) * 0.01
                found[f"{stem}.lora_B.weight"] = torch.randn(one.num_outputs, RANK) * 0.01
        save_file(found, folder / "adapter_model.safetensors")
        settings = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS))
        settings.save_pretrained(folder)
        (folder / "state.json").write_text("{}")

    folder = CheckpointFolder(
        checkpoints, run_id="r", attempt=1, fence=checkpoints / "fence", failpoints=Failpoints("")
    )
    about = {
        "spec_sha256": "",
        "data_sha256": "",
        "model_sha256": hash_model(model, None),
        "versions": {},
    }
    folder.commit(1, write, about)


def make_capped(job: Path, cap_gib: float | None) -> int:
    """Do the node's job in this process, with so much of the GPU as a smaller card would have."""
    from agents.quantizers import make as making

    if cap_gib is not None:
        import torch

        cap_bytes = int(cap_gib * 2**30)
        whole_bytes = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(cap_bytes / whole_bytes)
        torch.cuda.mem_get_info = lambda *_: (cap_bytes - torch.cuda.memory_reserved(), cap_bytes)
    return making.main([str(job)])
