"""What is freed in large blocks leaves the process, although small ones lie between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
MIB = 1 << 20
_SCRIPT = """
import ctypes, json
from agents.quantizers.job.heap import mapping_large_blocks, return_free_memory
from tests.agents.quantizers.own_memory import read_own_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
SIZE = 4 << 20

def leave():
    before, large, small = read_own_bytes(), [], []
    for _ in range(16):
        large.append(libc.malloc(SIZE))
        ctypes.memset(large[-1], 1, SIZE)
        small.append(libc.malloc(2000))
    for one in large:
        libc.free(one)
    left = read_own_bytes() - before
    for one in small:
        libc.free(one)
    return_free_memory()
    return left

libc.free(libc.malloc(20 << 20))  # from now on, blocks of this size come from the heap
found = [leave()]
with mapping_large_blocks():
    found.append(leave())
found.append(leave())
print(json.dumps(found))
"""


def test_large_blocks_are_returned_when_they_are_freed():
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    usual, mapped, after = json.loads(done.stdout)
    assert mapped < 8 * MIB
    assert min(usual, after) > 48 * MIB, "the system's own heap keeps them"
