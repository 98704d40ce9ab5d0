"""Attacks on real runs: faults drawn from a seed, judged from what the nodes themselves wrote.

    python -m tests.campaign --faults 30 --seed 1 --out table.json

Needs root, iproute2 and openssh-server, as `tests/cluster` does. See RELIABILITY.md.
"""
