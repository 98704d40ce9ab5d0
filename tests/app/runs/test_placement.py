"""Which rank runs where, and over which address: from facts of nodes of every kind."""

from __future__ import annotations

import pytest

from agents.contract.node import GpuFacts, InterfaceFacts
from agents.contract.run import choose_checkpoint_ranks
from app.errors import UserError
from app.nodes.endpoints import choose_endpoints
from app.runs.placement import place_ranks, shares_a_gpu
from tests.fakes.cluster import make_facts


def gpus(*uuids: str) -> tuple[GpuFacts, ...]:
    return tuple(GpuFacts(uuid=uuid, index=i, name="RTX") for i, uuid in enumerate(uuids))


def interfaces(**addresses: str) -> tuple[InterfaceFacts, ...]:
    return tuple(InterfaceFacts(name=name, address=a) for name, a in addresses.items())


def test_one_rank_per_gpu_and_one_for_a_node_without() -> None:
    ranks = place_ranks({"a": make_facts(gpus=gpus("u0", "u1")), "b": make_facts(gpus=gpus("u2"))})
    assert [(r.rank, r.local_rank, r.node, r.device, r.device_id) for r in ranks] == [
        (0, 0, "a", "cuda:0", "u0"),
        (1, 1, "a", "cuda:1", "u1"),
        (2, 0, "b", "cuda:0", "u2"),
    ]
    only = place_ranks({"a": make_facts()})
    assert [(r.rank, r.device, r.device_id) for r in only] == [(0, "cpu", "cpu")]


@pytest.mark.parametrize(
    ("num_gpus", "num_names", "expected"),
    [
        (1, 3, [["u0"], ["u0"], ["u0"]]),
        (2, 3, [["u0"], ["u1"], ["u0"]]),
        (3, 3, [["u0"], ["u1"], ["u2"]]),
        (4, 3, [["u0", "u3"], ["u1"], ["u2"]]),
        (8, 2, [["u0", "u2", "u4", "u6"], ["u1", "u3", "u5", "u7"]]),
    ],
)
def test_names_of_one_pc_divide_its_gpus(
    num_gpus: int, num_names: int, expected: list[list[str]]
) -> None:
    cards = gpus(*(f"u{number}" for number in range(num_gpus)))
    ranks = place_ranks({f"n{number}": make_facts(gpus=cards) for number in range(num_names)})
    used = [[r.device_id for r in ranks if r.node == f"n{n}"] for n in range(num_names)]
    assert used == expected
    assert shares_a_gpu(ranks) is (num_gpus < num_names)


def test_ranks_on_cpus_share_no_gpu() -> None:
    assert not shares_a_gpu(place_ranks({"a": make_facts(), "b": make_facts()}))


def test_checkpoints_are_written_on_as_many_nodes_as_asked() -> None:
    ranks = place_ranks(
        {"a": make_facts(gpus=gpus("u0", "u1")), "b": make_facts(gpus=gpus("u2")),
         "c": make_facts(gpus=gpus("u3"))}
    )  # fmt: skip
    assert choose_checkpoint_ranks(ranks, 1) == (0,)
    assert choose_checkpoint_ranks(ranks, 2) == (0, 2)
    assert choose_checkpoint_ranks(ranks, 9) == (0, 2, 3)


def test_nodes_behind_ssh_use_the_address_they_were_reached_by() -> None:
    found = choose_endpoints(
        {
            "a": make_facts(
                address="10.0.0.2", interfaces=interfaces(lo="127.0.0.1", eth0="10.0.0.2")
            ),
            "b": make_facts(address="10.0.0.3", interfaces=interfaces(wlan0="192.168.1.9")),
        }
    )
    assert (found["a"].address, found["a"].interface) == ("10.0.0.2", "eth0")
    assert (found["b"].address, found["b"].interface) == ("10.0.0.3", None)


def test_the_masters_own_pc_uses_its_address_in_the_network_of_the_others() -> None:
    own = interfaces(lo="127.0.0.1", docker0="172.17.0.1", wlan0="192.168.7.5", eth1="10.0.0.9")
    for address in (None, "127.0.0.1"):
        found = choose_endpoints(
            {"me": make_facts(address=address, interfaces=own), "b": make_facts(address="10.0.0.3")}
        )
        assert (found["me"].address, found["me"].interface) == ("10.0.0.9", "eth1")


def test_alone_or_all_on_loopback_talk_over_loopback() -> None:
    for alone in (None, "10.0.0.2", "127.0.0.1", "fd00::2"):
        facts = make_facts(address=alone, interfaces=interfaces(eth0="10.0.0.2"))
        found = choose_endpoints({"me": facts})
        assert (found["me"].address, found["me"].interface) == ("127.0.0.1", "lo")
    found = choose_endpoints({"me": make_facts(address=None)})
    assert (found["me"].address, found["me"].interface) == ("127.0.0.1", "lo")
    found = choose_endpoints({name: make_facts(address="127.0.0.1") for name in "abc"})
    assert {endpoint.address for endpoint in found.values()} == {"127.0.0.1"}


def test_pc_without_any_other_address_cannot_join_remote_nodes() -> None:
    with pytest.raises(UserError, match="node me has no address that the other nodes can reach"):
        choose_endpoints(
            {
                "me": make_facts(address=None, interfaces=interfaces(lo="127.0.0.1")),
                "b": make_facts(address="10.0.0.3"),
            }
        )


def test_ipv6_link_addresses_find_their_interface() -> None:
    found = choose_endpoints(
        {
            "a": make_facts(address="fe80::2%eth0", interfaces=interfaces(eth0="fe80::2%eth0")),
            "me": make_facts(
                address=None, interfaces=interfaces(eth0="192.168.1.2", eth1="fe80::9%eth1")
            ),
        }
    )
    assert found["me"].address == "fe80::9%eth1"
