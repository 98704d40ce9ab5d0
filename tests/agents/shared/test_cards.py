"""Cards are found by every spelling that drivers and users write, with the memory it names."""

from __future__ import annotations

import pytest

from agents.shared.cards import GIB, find_card, find_similar, list_cards, refuse_vendor


@pytest.mark.parametrize("name", list_cards())
def test_a_card_is_found_however_it_is_written(name: str) -> None:
    spellings = (name, name.upper(), name.replace(" ", "-"), name.replace(" ", "_"),
                 name.replace(" ", ""), f"NVIDIA GeForce {name}", f"nvidia {name} GPU")  # fmt: skip
    assert {spelling: found.name if (found := find_card(spelling)) else None
            for spelling in spellings} == dict.fromkeys(spellings, name)  # fmt: skip


@pytest.mark.parametrize(
    ("written", "listed", "gib"),
    [
        ("RTX 4060 Ti 16GB", "RTX 4060 Ti 16GB", 16),
        ("4060ti 16g", "RTX 4060 Ti 16GB", 16),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", 40),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe", 80),
        ("A100 40GB", "A100 40GB", 40),
        ("Tesla V100-SXM2-32GB", "V100", 32),
        ("H100 SXM5", "H100 80GB HBM3", 80),
        ("NVIDIA GeForce GTX 1060 6GB", "GTX 1060", 6),
        ("GTX 1060 3GB", "GTX 1060 3GB", 3),
        ("RTX 2080 Ti 22GB", "RTX 2080 Ti", 22),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", 48),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Max-Q", 96),
        ("NVIDIA RTX PRO 4000 Blackwell", "RTX PRO 4000", 24),
        ("DGX Spark", "GB10", 119),
        ("RTX 3080 Laptop GPU 16GB", "RTX 3080 Laptop GPU", 16),
    ],
)
def test_a_size_and_a_form_factor_in_a_name_count(written: str, listed: str, gib: int) -> None:
    found = find_card(written)
    assert found is not None
    assert (found.name, found.memory_bytes / GIB) == (listed, gib)


def test_the_drivers_memory_tells_cards_of_one_name_apart() -> None:
    small, large = (find_card("NVIDIA GeForce RTX 3080", int(gib * GIB)) for gib in (10, 11.99))
    assert small is not None
    assert large is not None
    assert (small.name, large.name) == ("RTX 3080", "RTX 3080 12GB")


@pytest.mark.parametrize("name", ["RTX 4000", "GTX 980", "Strange 1", "A770", ""])
def test_an_unknown_name_is_no_listed_card(name: str) -> None:
    assert find_card(name) is None


def test_an_unlisted_card_gets_the_lowest_figures_of_its_class() -> None:
    for name, capability in (("RTX 5055", None), ("RTX 3040 Laptop GPU", None), ("X", (8, 6))):
        found = find_similar(name, capability)
        assert found is not None
        alike = [one for other in list_cards() if (one := find_card(other)) is not None
                 and one.capability == found.capability
                 and one.is_laptop == found.is_laptop]  # fmt: skip
        assert all(found.flops_per_s <= one.flops_per_s for one in alike)
        assert all(found.memory_bytes_per_s <= one.memory_bytes_per_s for one in alike)


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [("Radeon RX 7900 XTX", True), ("RX 6800 XT", True), ("7900 XTX", True), ("MI300X", True),
     ("Intel Arc A770", True), ("Apple M3 Max", True), ("RTX A4000", False), ("Tesla M40", False),
     ("Quadro M6000", False), ("RTX 4090 D", False)],
)  # fmt: skip
def test_other_vendors_are_refused(name: str, is_refused: bool) -> None:
    assert bool(refuse_vendor(name)) == is_refused
