"""The Add a PC dialog's logic, as data."""

import pytest

from app.flows.add_node import Answers, review, suggest_name
from app.nodes.node import LocalAddress, SshAddress


def test_this_pc_needs_no_answer():
    result = review(Answers(way="local", target="nonsense"), ())
    assert (result.name, result.address, result.problems) == ("this-pc", LocalAddress(), {})


def test_ssh_with_port():
    result = review(Answers(target=" anna@Gamer.lan:2222 "), ())
    assert result.address == SshAddress(user="anna", host="gamer.lan", port=2222)
    assert result.name == "gamer"


@pytest.mark.parametrize("target", ["", "pc", "@pc", "anna@", "anna@pc:0", "anna@pc:x"])
def test_a_wrong_address_is_told_at_its_field(target):
    result = review(Answers(target=target), ())
    assert result.address is None
    assert "USER@HOST" in result.problems["target"]


@pytest.mark.parametrize("name", ["a b", "all", "-x", "alpha", "x" * 64])
def test_a_wrong_name_is_told_at_its_field(name):
    result = review(Answers(target="a@b", name=name), ("alpha",))
    assert result.address is None
    assert list(result.problems) == ["name"]


def test_suggested_names_are_free():
    assert suggest_name("gamer-pc.lan", ()) == "gamer-pc"
    assert suggest_name("gamer-pc", ("gamer-pc",)) == "gamer-pc-1"
    assert suggest_name("10.0.0.2", ("node-1",)) == "node-2"
    assert suggest_name("fe80::1", ()) == "node-1"
