"""The Add a PC dialog's logic, as data."""

from dataclasses import replace

import pytest

from agents.contract.node import InterfaceFacts
from app.flows.add_node import NodeAnswers, describe_found, review, suggest_name
from app.nodes.node import LocalAddress, SshTarget, WslAddress
from tests.fakes.core import make_node


def test_this_pc_needs_no_answer():
    result = review(NodeAnswers(way="local", target="nonsense"), ())
    assert (result.name, result.address, result.problems) == ("this-pc", LocalAddress(), {})


def test_ssh_with_port():
    result = review(NodeAnswers(target=" anna@Gamer.lan:2222 "), ())
    assert result.address == SshTarget(user="anna", host="Gamer.lan", port=2222)
    assert result.name == "gamer"


@pytest.mark.parametrize("target", ["", "@pc", "anna@", "anna@pc:0", "anna@pc:x"])
def test_a_wrong_address_is_told_at_its_field(target):
    result = review(NodeAnswers(target=target), ())
    assert result.address is None
    assert "USER@HOST" in result.problems["target"]


@pytest.mark.parametrize("name", ["a b", "all", "-x", "alpha", "x" * 64])
def test_a_wrong_name_is_told_at_its_field(name):
    result = review(NodeAnswers(target="a@b", name=name), ("alpha",))
    assert result.address is None
    assert list(result.problems) == ["name"]


def test_a_wsl_distro_is_an_address():
    result = review(NodeAnswers(way="wsl", distro="Ubuntu-24.04", target="nonsense"), ())
    assert (result.name, result.address) == ("this-pc", WslAddress(distro="Ubuntu-24.04"))
    none = review(NodeAnswers(way="wsl"), ())
    assert none.address is None
    assert "wsl --install" in none.problems["distro"]


def test_what_was_found_and_what_will_hurt():
    alpha = make_node("alpha", ("NVIDIA GeForce RTX 3090", 24))
    assert "gcc" in describe_found(alpha).notes[0]
    good = describe_found(replace(alpha, facts=replace(alpha.facts, compiler="/usr/bin/cc")))
    assert dict(good.rows)["GPU"] == "NVIDIA GeForce RTX 3090, 24.0 GiB"
    assert dict(good.rows)["Disk"] == "412 GiB free of 930 GiB"
    assert (good.notes, good.is_ready) == ((), True)

    node = make_node("beta")
    bad = describe_found(
        replace(
            node,
            facts=replace(
                node.facts,
                disk_free_bytes=8 * 1024**3,
                interfaces=(InterfaceFacts(name="eth0", address="10.0.0.2", speed_mbit=100),),
                wsl="nat",
                environment=None,
            ),
        )
    )
    assert dict(bad.rows)["GPUs"] == "none"
    assert not bad.is_ready
    for words in ("No NVIDIA GPU", "8.0 GiB of disk left", "100 Mbit/s", "networkingMode=mirrored"):
        assert any(words in note for note in bad.notes), words


def test_suggested_names_are_free():
    assert suggest_name("gamer-pc.lan", ()) == "gamer-pc"
    assert suggest_name("gamer-pc", ("gamer-pc",)) == "gamer-pc-1"
    assert suggest_name("10.0.0.2", ("node-1",)) == "node-2"
    assert suggest_name("fe80::1", ()) == "node-1"


def test_a_node_behind_a_virtual_network_is_warned_of():
    alpha = make_node("alpha", ("NVIDIA GeForce RTX 3090", 24))
    for address, device in (("100.101.2.3", "tailscale0"), ("10.8.0.2", "wg0")):
        card = InterfaceFacts(name=device, address=address)
        facts = replace(alpha.facts, address=address, interfaces=(card,))
        assert "gradients over it are slow" in describe_found(replace(alpha, facts=facts)).notes[0]
