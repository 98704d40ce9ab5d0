"""Two NCCL ranks that meet in the ranks' own store, and where they listen meanwhile.

`python -m tests.agents.trainer.rank.nccl_ranks` on a PC with one GPU or more, without pytest and
without `ss`: reads /proc/net. Prints a table of the listening sockets of both ranks and of the
store, for a meeting on loopback and for one on the PC's own address, with NCCL's monitor off and
on. Exits with 0 if all of them listen on the one address alone and both ranks end well, also the
one that stays after the store has gone.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.agents.trainer.ranks import one_credential

ROOT = Path(__file__).resolve().parents[4]
NUM_SUMS = 20
STAY_S = 4.0
"""How long rank 1 stays after rank 0, in seconds: the monitor looks once a second."""
LIMIT_S = 180.0
_LISTENING = "0A"


def be_rank() -> None:
    """Be one of the ranks: the child's side of this program."""
    import torch
    from torch import distributed as dist

    from agents.trainer.rank.group import Group, Ranks

    ranks = Ranks.from_environment()
    device = torch.device("cuda", ranks.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = Group(ranks, ["rank 0", "rank 1"])
    group.join("nccl", device, sys.stdin.read())
    for number in range(NUM_SUMS):
        values = torch.full((1 << 18,), float(ranks.rank + number), device=device)
        group.sum(values)
        if not bool((values == 2 * number + 1).all()):
            raise SystemExit(f"sum {number} is wrong: {values[0]}")
    print(f"rank {ranks.rank}: NCCL {torch.cuda.nccl.version()}, torch {torch.__version__}")
    print(f"rank {ranks.rank}: summed", flush=True)
    time.sleep(3.0)  # for whoever reads where we listen
    dist.barrier()
    if ranks.rank == 1:
        time.sleep(STAY_S)
    group.leave()
    print(f"rank {ranks.rank}: left", flush=True)
    os._exit(0)


def listening(pids: list[int]) -> list[tuple[int, str, int]]:
    """Return (pid, address, port) of every TCP socket on which one of the processes listens."""
    owners = {}
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                owners[os.readlink(entry)] = pid
            except OSError:
                continue
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            owner = owners.get(f"socket:[{fields[9]}]")
            if fields[3] == _LISTENING and owner is not None:
                address, port = fields[1].split(":")
                found.append((owner, read_address(address), int(port, 16)))
    return found


def read_address(text: str) -> str:
    """Return an address as /proc/net writes it: words in the order of this PC's bytes."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))


def start_rank(rank: int, address: str, port: int, monitor: str) -> subprocess.Popen[str]:
    environ = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2" if ipaddress.ip_address(address).is_loopback else "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCH_NCCL_ENABLE_MONITORING": monitor,
        # Several ranks on one GPU, as on several PCs: through sockets.
        "NCCL_HOSTID": f"host-{rank}",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "tests.agents.trainer.rank.nccl_ranks", "rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
        cwd=ROOT,
    )


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def try_address(address: str, monitor: str) -> bool:
    """Let two ranks meet there; return whether they listened there alone and ended well."""
    from agents.rendezvous.host import listen_at

    with listen_at(address, 0) as free:
        port = free.getsockname()[1]
    credential = one_credential()
    ranks = [start_rank(rank, address, port, monitor) for rank in range(2)]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(credential)
        rank.stdin.close()
    try:
        assert ranks[0].stdout is not None
        for line in ranks[0].stdout:
            print("  " + line.rstrip())
            if "summed" in line:
                break
        names = {rank.pid: f"rank {number}" for number, rank in enumerate(ranks)}
        names |= {pid: f"child of {names[p.pid]}" for p in ranks for pid in children_of(p.pid)}
        found = listening(list(names))
        for pid, where, at in found:
            print(f"  {names[pid]:16} listens on {where} port {at}")
        codes = [rank.wait(LIMIT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    stray = [where for _, where, _ in found if where != address]
    print(f"  exit codes {codes}, {len(found)} sockets, elsewhere: {stray or 'none'}")
    return codes == [0, 0] and bool(found) and not stray


def main() -> int:
    from agents.rendezvous.interfaces import find_interface, read_addresses

    own = [str(a) for device, a in read_addresses() if device != "lo" and a.version == 4]
    results = []
    for address in ("127.0.0.1", *own[:1]):
        for monitor in ("0", "1"):
            print(f"{address} on {find_interface(address)}, NCCL's monitor {monitor}")
            results.append(try_address(address, monitor))
    print("all well" if all(results) else "FAILED")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(be_rank() if sys.argv[1:] == ["rank"] else main())
