"""Seeds of random draws, so that a test that fails can be repeated.

Every draw has a seed: one that a test names itself, by `seed`, or the one that its conftest sets
from the test's name before it calls the test. All change with RACKLESS_TEST_SEED.
"""

from __future__ import annotations

import os
import random
import sys
import zlib

BASE_SEED = int(os.environ.get("RACKLESS_TEST_SEED", "0"))


def seed(number: int) -> int:
    """Return the seed with this number; under the base seed 0 it is the number itself."""
    return 1_000_003 * BASE_SEED + number


def random_bytes(num_bytes: int, of: int | str = 0) -> bytes:
    """Return bytes that differ for each number or name `of`."""
    number = zlib.crc32(of.encode()) if isinstance(of, str) else of
    return random.Random(seed(number)).randbytes(num_bytes)


def seed_global_generators(name: str) -> None:
    """Seed those that draws without a generator use, such as the weights of a module made."""
    number = seed(zlib.crc32(name.encode()))
    random.seed(number)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(number % 2**32)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(number)
