"""Chips for the GPUs of a PC that has several."""

from __future__ import annotations

from PySide6.QtWidgets import QApplication

from app.gui.forms.gpu_chips import GpuChips


def test_a_chip_leaves_out_one_gpu_of_a_pc(application: QApplication) -> None:
    chips, edits = GpuChips("tower"), list[int]()
    chips.edited.connect(lambda: edits.append(1))
    chips.show_gpus(["RTX 4090"])
    assert (chips.is_used, chips.list_entries()) == (False, ["tower"])
    chips.show_gpus(["RTX 4090", "RTX 3060"])
    assert chips.list_entries() == ["tower"]
    chips.chips[1].click()
    assert (chips.list_entries(), edits) == (["tower:0"], [1])
    chips.choose([1])
    assert (chips.list_entries(), edits) == (["tower:1"], [1])
    chips.choose(None)
    assert chips.list_entries() == ["tower"]
