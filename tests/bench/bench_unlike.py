"""How much of the summed speed of unlike cards is used: ours against DistributedDataParallel.

    python -m tests.bench.bench_unlike                    # CPU: calibrated sleeps, Gloo
    python -m tests.bench.bench_unlike --device cuda      # one GPU per rank, NCCL over sockets

Each rank lives in a network namespace with a link shaped on both ends, so every byte crosses it
(the counters are printed). A layer's work is a sleep in proportion to its tokens, a third of it in
the forward pass; its gradients are those of LoRA r=16 on q,k,v,o of an 8B model: 54.5 MB in fp32 in
32 layers. Splitting, sending and re-sharing are the trainer's own code. eta is tokens per second of
all ranks together over the sum of what each does alone, timed in the same run. No optimizer runs on
either side. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from agents.shared.micro_shapes import group_examples
from agents.trainer.optim.flat_parameters import FlatParameters
from agents.trainer.parallel.balance import Balancer, choose_first_shares
from agents.trainer.parallel.reducer import ExactTransport, Reducer
from agents.trainer.parallel.shares import split_batch
from agents.trainer.rank.group import Group, Ranks
from tests.cluster.namespaces import SYSTEM_PATH, run_tool

ROOT = Path(__file__).parents[2]
LAYERS, SHAPE = 32, (104, 4096)
"""13.6 million parameters: 54.5 MB."""
UNLIKE = (1054.0, 699.0, 522.0)
"""Tokens per second of 87.9 : 58.3 : 43.5 TFLOP/s cards at 55 % on 8B QLoRA."""
EQUAL = (1054.0, 1054.0)
SEQUENCES, MICRO_TOKENS = 64, 2048
CASES = {"unlike-1g": (UNLIKE, "1gbit"), "unlike-2.5g": (UNLIKE, "2500mbit"),
         "equal-1g": (EQUAL, "1gbit")}  # fmt: skip


class Clock:
    """Keeps a device busy for so long."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cycles_per_s = 0.0
        if device.type == "cuda":
            torch.cuda._sleep(10**8)
            torch.cuda.synchronize(device)
            began_s = time.perf_counter()
            torch.cuda._sleep(10**9)
            torch.cuda.synchronize(device)
            self._cycles_per_s = 1e9 / (time.perf_counter() - began_s)

    def work(self, seconds: float) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
        else:
            time.sleep(seconds)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Busy(torch.autograd.Function):
    """A layer that takes its time and has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: Clock, layer_s: float) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.clock, ctx.layer_s = clock, layer_s
        clock.work(layer_s / 3)
        return x + 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        ctx.clock.work(ctx.layer_s * 2 / 3)
        return gradient, torch.ones_like(weight), None, None


class Net(nn.Module):
    """The layers of one rank that does `speed` tokens per second."""

    def __init__(self, clock: Clock, speed: float) -> None:
        super().__init__()
        make = [nn.Parameter(torch.zeros(SHAPE, device=clock.device)) for _ in range(LAYERS)]
        self.layers = nn.ParameterList(make)
        self._clock = clock
        self._layer_s = 1 / speed / LAYERS

    def forward(self, num_tokens: int) -> Tensor:
        x = torch.zeros(1, device=self._clock.device, requires_grad=True)
        for weight in self.layers:
            x = Busy.apply(x, weight, self._clock, self._layer_s * num_tokens)
        return x.sum()


def choose_lengths(step: int) -> list[int]:
    """Return the tokens of the sequences of a step, the same on all ranks."""
    draw = random.Random(step)
    return [draw.randint(128, 384) for _ in range(SEQUENCES)]


def run_ours(net: Net, clock: Clock, group: Group, solo: list[float], steps: int) -> list[float]:
    """Return tokens per second of each step, with the trainer's own shares and reducer."""
    flat = FlatParameters(list(net.named_parameters()), clock.device)
    reducer = Reducer(flat, ExactTransport(group), world_size=group.world_size)
    balancer = Balancer(choose_first_shares(solo), active=True)
    found = []
    for step in range(steps):
        began_s = time.perf_counter()
        lengths = choose_lengths(step)
        mine = [lengths[i] for i in split_batch(lengths, balancer.shares)[group.rank]]
        micros = group_examples(mine, MICRO_TOKENS)
        reducer.begin()
        flat.gradients.zero_()
        for micro in micros:
            loss = net(sum(mine[i] for i in micro))
            if micro is micros[-1]:
                reducer.arm()
            loss.backward()
        clock.wait()
        told = torch.zeros(2, group.world_size, dtype=torch.float64)
        told[0, group.rank] = time.perf_counter() - began_s
        told[1, group.rank] = sum(mine)
        reducer.finish()
        told = told.to(clock.device)
        group.sum(told)
        seconds, tokens = told.tolist()
        found.append(sum(lengths) / (time.perf_counter() - began_s))
        balancer.learn(seconds, tokens)
        expected = sum(len(group_examples([lengths[i] for i in part], MICRO_TOKENS))
                       for part in split_batch(lengths, balancer.shares))  # fmt: skip
        if step == 0 and float(flat.gradients[-1]) != expected:
            raise RuntimeError(f"the sum is {float(flat.gradients[-1])}, not {expected}")
    return found


def run_ddp(net: Net, clock: Clock, group: Group, steps: int) -> list[float]:
    """Return tokens per second of each step, with DistributedDataParallel and even shares."""
    model = nn.parallel.DistributedDataParallel(net)
    found = []
    for step in range(steps):
        began_s = time.perf_counter()
        lengths = choose_lengths(step)
        mine = [lengths[i] for i in split_batch(lengths, [1.0] * group.world_size)[group.rank]]
        micros = group_examples(mine, MICRO_TOKENS)
        for micro in micros:
            last = micro is micros[-1]
            with contextlib.nullcontext() if last else model.no_sync():
                model(sum(mine[i] for i in micro)).backward()
        clock.wait()
        group.sum(torch.zeros(1, device=clock.device))
        clock.wait()
        found.append(sum(lengths) / (time.perf_counter() - began_s))
    return found


def be_rank(speeds: tuple[float, ...], device_name: str, steps: int) -> None:
    """Be one rank of a case; rank 0 prints what came of it."""
    ranks = Ranks.from_environment()
    device = torch.device("cuda", ranks.rank) if device_name == "cuda" else torch.device("cpu")
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = Group(ranks, [f"rank {rank}" for rank in range(ranks.world_size)])
    group.join("nccl" if device.type == "cuda" else "gloo", device)
    group.sum(torch.zeros(1, device=device))
    clock = Clock(device)
    net = Net(clock, speeds[ranks.rank])
    net(64).backward()
    clock.wait()
    began_s = time.perf_counter()
    net(MICRO_TOKENS).backward()
    clock.wait()
    mine = {"solo": MICRO_TOKENS / (time.perf_counter() - began_s)}
    solo = [float(told["solo"]) for told in group.exchange("solo", mine)]
    whole = sum(solo)
    ddp = run_ddp(Net(clock, speeds[ranks.rank]), clock, group, steps)
    ours = run_ours(Net(clock, speeds[ranks.rank]), clock, group, solo, steps)
    if ranks.rank == 0:
        ddp, ours = ddp[1:], ours[1:]  # connections are made in the first step
        print(json.dumps({
            "eta_ours": round(sum(ours) / len(ours) / whole, 4),
            "eta_ddp": round(sum(ddp) / len(ddp) / whole, 4),
            "solo_tokens_per_s": [round(one) for one in solo],
            "steps": [[round(one / whole, 3) for one in found] for found in (ours, ddp)],
        }), flush=True)  # fmt: skip
    group.exchange("done", {})
    dist.barrier()
    os._exit(0)


class Links:
    """One namespace per rank, on a bridge, each link shaped on both ends."""

    def __init__(self, count: int, rate: str) -> None:
        self._fabric = f"rackless-{os.getpid()}-eta{count}"
        self.names = [f"{self._fabric}-{rank}" for rank in range(count)]
        run_tool("ip", "netns", "add", self._fabric)
        run_tool("ip", "-n", self._fabric, "link", "add", "bridge", "type", "bridge")
        run_tool("ip", "-n", self._fabric, "link", "set", "bridge", "up")
        shape = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "20ms"]
        for rank, name in enumerate(self.names):
            port = f"to-{rank}"
            run_tool("ip", "netns", "add", name)
            run_tool("ip", "link", "add", "eth0", "netns", name, "type", "veth",
                     "peer", "name", port, "netns", self._fabric)  # fmt: skip
            run_tool("ip", "-n", name, "link", "set", "lo", "up")
            run_tool("ip", "-n", name, "addr", "add", f"10.78.0.{rank + 1}/24", "dev", "eth0")
            run_tool("ip", "-n", name, "link", "set", "eth0", "up")
            run_tool("ip", "-n", self._fabric, "link", "set", port, "master", "bridge", "up")
            run_tool("tc", "-n", name, "qdisc", "add", "dev", "eth0", *shape)
            run_tool("tc", "-n", self._fabric, "qdisc", "add", "dev", port, *shape)

    def sent_bytes(self) -> list[int]:
        """Return what each rank has sent over its link so far."""
        counter = "/sys/class/net/eth0/statistics/tx_bytes"
        return [int(run_tool("ip", "netns", "exec", name, "cat", counter)) for name in self.names]

    def close(self) -> None:
        for name in (*self.names, self._fabric):
            run_tool("ip", "netns", "del", name, check=False)


def run_case(name: str, device: str, steps: int) -> dict[str, Any]:
    """Run all ranks of a case and return its figures."""
    speeds, rate = CASES[name]
    links = Links(len(speeds), rate)
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, namespace in enumerate(links.names):
            environ = {
                **os.environ, "PATH": SYSTEM_PATH, "PYTHONPATH": str(ROOT), "RANK": str(rank),
                "WORLD_SIZE": str(len(speeds)), "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": "10.78.0.1", "MASTER_PORT": "29511", "GLOO_SOCKET_IFNAME": "eth0",
                "NCCL_SOCKET_IFNAME": "eth0", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1",
                "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_HOSTID": f"host{rank}",
                "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "1",
            }  # fmt: skip
            command = ["ip", "netns", "exec", namespace, sys.executable, "-m",
                       "tests.bench.bench_unlike", "--rank-of", name, "--device", device,
                       "--steps", str(steps)]  # fmt: skip
            started.append(subprocess.Popen(
                command, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE
            ))  # fmt: skip
        output = [process.communicate(timeout=280)[0] for process in started]
        figures: dict[str, Any] = json.loads(output[0].splitlines()[-1])
        sent = [round(count / 1e6) for count in links.sent_bytes()]
        return {"case": name, **figures, "sent_mb_per_rank": sent}
    finally:
        for process in started:
            process.kill()
        links.close()


def main() -> None:
    """Run the cases and print a JSON line for each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", nargs="*", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank-of", choices=tuple(CASES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        be_rank(CASES[args.rank_of][0], args.device, args.steps)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    print(json.dumps({"machine": machine, "cores": os.cpu_count(), **versions}))
    for name in args.cases:
        print(json.dumps(run_case(name, args.device, args.steps)), flush=True)


if __name__ == "__main__":
    main()
