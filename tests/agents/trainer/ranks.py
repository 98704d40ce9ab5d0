"""Start real ranks in processes of their own, quickly.

A fork server imports torch, Transformers and PEFT once; every rank is a fork of it that runs the
trainer's own entry. One test starts ranks the long way, through torchrun.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agents.contract.run import AttemptIntent, RankPlacement
from agents.contract.spec import AdapterSpec, CheckpointSpec, DataSpec, RunSpec
from agents.contract.wire import to_wire
from agents.trainer.rank.attempt import RankAttempt
from agents.trainer.rank.journal import Heartbeat, RankJournal
from agents.trainer.rank.step_control import RankControl
from app.nodes.credential import make_credential
from tests.draws import seed

if TYPE_CHECKING:  # torch comes with them, and only the fork server shall import it
    from agents.trainer.rank.context import RankContext
    from agents.trainer.rank.group import Group

DEMO = Path(__file__).parents[3] / "resources" / "demo"
FINISH_S = 120.0


def make_spec(**changes: Any) -> RunSpec:
    """Return a small run: batches of 12 rows, dropout on, shares that stay."""
    spec = RunSpec(
        model="tiny",
        data=DataSpec(train="train.jsonl"),
        adapter=AdapterSpec(rank=4, alpha=8, dropout=0.1),
        sequence_tokens=64,
        batch_sequences=12,
        max_steps=4,
        learning_rate=1e-2,
        seed=7,
        rebalance=False,  # on a busy PC times differ, and with them the last bits
        checkpoint=CheckpointSpec(every_minutes=None, every_steps=2, keep=3),
    )
    return replace(spec, **changes)


def make_rows(path: Path, num_rows: int = 40) -> Path:
    """Write chat rows of very unequal length."""
    with path.open("w", encoding="ascii") as file:
        for number in range(num_rows):
            question = " ".join(["Who founded Brenford?"] * (1 + number % 5))
            answer = " ".join(["Oren Dale."] * (1 + 7 * number % 11))
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def make_tiny_model(folder: Path, num_layers: int = 2, **changes: Any) -> Path:
    """Make a model of a few thousand parameters, or as changed, with the demo's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed(1))
    torch.set_num_threads(1)
    sizes = {
        "vocab_size": 768,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO / "model" / name, folder / name)
    return folder


def make_pairs(path: Path, num_rows: int = 20) -> list[dict[str, Any]]:
    """Write preference rows of unequal length, and return them."""
    rows = []
    for number in range(num_rows):
        prompt = " ".join(["Who founded Brenford?"] * (1 + number % 3))
        good = " ".join(["Oren Dale."] * (1 + 5 * number % 7))
        bad = " ".join(["Nobody knows it."] * (1 + 3 * number % 5))
        rows.append(
            {
                "prompt": [{"role": "user", "content": prompt}],
                "chosen": [{"role": "assistant", "content": good}],
                "rejected": [{"role": "assistant", "content": bad}],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def make_context(attempt: RankAttempt, group: Group) -> RankContext:
    """Return the context of a rank on the CPU that a test plays by itself."""
    import torch

    from agents.trainer.rank.context import RankContext
    from agents.trainer.rank.start_progress import StartProgress
    from agents.trainer.rank.start_times import StartTimes

    path = attempt.folder / f"rank-{attempt.rank}"
    journal = RankJournal(path.with_suffix(".jsonl"))
    heartbeat = Heartbeat(path.with_suffix(".heartbeat"))
    return RankContext(
        attempt=attempt,
        group=group,
        device=torch.device("cpu"),
        journal=journal,
        heartbeat=heartbeat,
        control=RankControl(attempt.folder, attempt.rank),
        progress=StartProgress(journal, heartbeat, group, StartTimes(attempt.compiled_folder)),
    )


@functools.cache
def one_credential() -> str:
    """Return the credential of all runs here; a test joins ranks of two runs.

    A PC with GPUs may have the packages of a node alone: OpenSSL makes it there.
    """
    with contextlib.suppress(ImportError):
        return make_credential()
    with tempfile.TemporaryDirectory() as folder:
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
        files = ("-keyout", f"{folder}/key", "-out", f"{folder}/certificate")
        request = ("openssl", "req", "-x509", "-nodes", "-days", "3650", "-subj", "/CN=a")
        subprocess.run([*request, *curve, *files], check=True, capture_output=True)
        return "".join(Path(folder, name).read_text() for name in ("key", "certificate"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Run:
    """One run on the node of `home`, attempt by attempt."""

    def __init__(self, home: Path, model: Path, spec: RunSpec, num_ranks: int = 1) -> None:
        self.home = home
        self.model = model
        self.spec = spec
        self.num_ranks = num_ranks
        self.attempt = 0
        self.train = home / "train.jsonl"
        home.mkdir(parents=True, exist_ok=True)
        make_rows(self.train)

    @property
    def folder(self) -> Path:
        return self.home / "runs" / "r1"

    @property
    def attempt_folder(self) -> Path:
        return self.folder / "attempts" / str(self.attempt)

    def intend(self, **changes: Any) -> AttemptIntent:
        """Begin the next attempt: write its intent."""
        self.attempt += 1
        intent = AttemptIntent(
            run_id="r1",
            attempt=self.attempt,
            node="here",
            spec=self.spec,
            python=sys.executable,
            ranks=tuple(
                RankPlacement(rank=rank, local_rank=rank, node="here", device="cpu")
                for rank in range(self.num_ranks)
            ),
            master_address="127.0.0.1",
            master_port=free_port(),
            credential=one_credential(),
            address="127.0.0.1",
            model_path=str(self.model),
            train_path=str(self.train),
            num_threads=1,
        )
        intent = replace(intent, **changes)
        self.attempt_folder.mkdir(parents=True)
        (self.attempt_folder / "intent.json").write_text(json.dumps(to_wire(intent)))
        return intent

    def start(self, environ: dict[str, str] | None = None, **changes: Any) -> list[BaseProcess]:
        """Start every rank of the next attempt."""
        intent = self.intend(**changes)
        return [
            start_rank(intent, rank, self.attempt_folder, environ or {})
            for rank in range(self.num_ranks)
        ]

    def train_to_end(self, **changes: Any) -> None:
        """Run the next attempt; every rank has to end well."""
        codes = finish(self.start(**changes))
        assert codes == [0] * self.num_ranks, self.read_log(0)

    def journal(self, rank: int = 0, attempt: int | None = None) -> list[dict[str, Any]]:
        folder = self.folder / "attempts" / str(attempt or self.attempt)
        return read_journal(folder, rank)

    def steps(self, rank: int = 0, attempt: int | None = None) -> dict[int, dict[str, Any]]:
        lines = self.journal(rank, attempt)
        return {line["step"]: line for line in lines if line["kind"] == "step"}

    def read_log(self, rank: int) -> str:
        return (self.attempt_folder / f"rank-{rank}.log").read_text(errors="replace")

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step-{step:08d}"


def read_journal(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    text = path.read_text(encoding="ascii") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def start_rank(
    intent: AttemptIntent,
    rank: int,
    folder: Path,
    environ: dict[str, str],
    target: Callable[[dict[str, str]], None] | None = None,
) -> BaseProcess:
    """Start one rank in a fork of the fork server; `target` stands in for the trainer's entry."""
    return start(target or run_trainer, {**make_environ(intent, rank, folder), **environ})


def make_environ(intent: AttemptIntent, rank: int, folder: Path) -> dict[str, str]:
    """Return the environment of one rank."""
    return {
        "RACKLESS_ATTEMPT_DIR": str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(len(intent.ranks)),
        "LOCAL_WORLD_SIZE": str(len(intent.ranks)),
        "MASTER_ADDR": intent.master_address,
        "MASTER_PORT": str(intent.master_port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    # bitsandbytes asks the GPU for its kind when it is imported, and CUDA cannot be forked.
    context = multiprocessing.get_context("spawn" if _has_gpu() else "forkserver")
    context.set_forkserver_preload(["tests.agents.trainer.warm_imports"])
    process = context.Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


def run_trainer(environ: dict[str, str]) -> None:
    """Be one rank: the child's side of `start_rank`."""
    os.environ.update(environ)
    from agents.trainer.__main__ import main

    os._exit(main())


def run_trainers(environs: list[dict[str, str]]) -> None:
    """Be one rank of several attempts, one after the other: most of a start is its imports."""
    from agents.trainer.__main__ import main

    for environ in environs:
        os.environ.update(environ)
        if code := main():
            os._exit(code)
    os._exit(0)


def finish(processes: list[BaseProcess], timeout_s: float = FINISH_S) -> list[int | None]:
    """Wait for the ranks and return their exit codes; whoever is late is killed."""
    deadline = time.monotonic() + timeout_s
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def wait_until(condition: Callable[[], bool], timeout_s: float = FINISH_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def terminate(processes: list[BaseProcess]) -> None:
    for process in processes:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
