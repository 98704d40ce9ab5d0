"""Choose suppliers of files: the order of a chain, and the next supplier when one is lost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from app.nodes.endpoints import is_loopback

Link = tuple[str, str]
"""Names of two nodes."""
# Share of the fastest rate below which a node counts as slow.
_SLOW_SHARE = 0.5
LAG_BYTES = 32 << 20
"""Growth of a node's lead over its successor, in bytes, from which the successor counts as slow:
the next node then fetches past it."""


def plan_order(
    nodes: Sequence[str], held_bytes: Mapping[str, int], rates: Mapping[Link, float]
) -> tuple[str, ...]:
    """Return the nodes in forwarding order: those that hold most first, slow ones last.

    Args:
        nodes: names; ties keep this order.
        held_bytes: bytes that each node already has.
        rates: measured rates of links, in bytes/s; links that were never measured count as fast.

    >>> plan_order(["a", "b", "c"], {"b": 9}, {("a", "c"): 1e7, ("b", "c"): 1e8, ("a", "b"): 1e8})
    ('b', 'a', 'c')
    >>> plan_order(["a", "b"], {}, {("a", "x"): 1e7, ("b", "x"): 1e8})
    ('b', 'a')
    """
    best = {
        name: max((r for link, r in rates.items() if name in link), default=0.0) for name in nodes
    }
    fastest = max(best.values(), default=0.0)

    def slowness(name: str) -> float:
        rate = best[name]
        return fastest / rate if 0 < rate < _SLOW_SHARE * fastest else 0.0

    return tuple(sorted(nodes, key=lambda name: (-held_bytes.get(name, 0), slowness(name))))


def next_supplier(
    node: str, chain: Sequence[str], lost: Collection[Link], gone: Collection[str]
) -> str | None:
    """Return the nearest earlier node of the chain to which `node` has not lost its link.

    Args:
        node: name of the node that needs another supplier.
        chain: names in forwarding order.
        lost: pairs of a node and a supplier from which it could not fetch.
        gone: nodes that no longer supply.

    Returns:
        The name; None if only the master is left.

    >>> next_supplier("c", ["a", "b", "c"], {("c", "b")}, ())
    'a'
    >>> next_supplier("c", ["a", "b", "c"], {("c", "b")}, {"a"}) is None
    True
    """
    earlier = chain[: list(chain).index(node)]
    usable = (n for n in reversed(earlier) if n not in gone and (node, n) not in lost)
    return next(usable, None)


def choose_toward(address: str, others: Sequence[str]) -> str:
    """Return the address of another node toward which a node listens; empty if its own suffices.

    >>> choose_toward("10.0.0.2", ["10.0.0.3"]), choose_toward("", ["10.0.0.3"])
    ('', '10.0.0.3')
    >>> choose_toward("127.0.0.1", ["127.0.0.2", "10.0.0.3"])
    '10.0.0.3'
    >>> choose_toward("127.0.0.1", ["127.0.0.2"])
    ''
    """
    if address and not is_loopback(address):
        return ""
    remote = [other for other in others if other and not is_loopback(other)]
    if remote:
        return remote[0]
    return "" if address else next((other for other in others if other), "127.0.0.1")
