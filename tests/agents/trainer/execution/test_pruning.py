"""What a search need not time."""

from agents.contract.layer_plan import LayerPlan, Needs
from agents.trainer.execution.pruning import cannot_win, without_launches
from agents.trainer.execution.setting import ExecutionSetting

# As measured on an H100: Llama-3.2-3B, 28 layers, LoRA, 16 GiB.
TRIED = [
    ExecutionSetting(micro_tokens=1024, is_repeating=True, tokens_per_s=26_409),
    ExecutionSetting(micro_tokens=2048, is_repeating=True, tokens_per_s=31_729),
    ExecutionSetting(micro_tokens=4096, is_repeating=True, num_moved=5, tokens_per_s=33_532),
    ExecutionSetting(micro_tokens=4096, is_repeating=True, num_recomputed=3, tokens_per_s=32_619),
]


def ask(tokens, num_recomputed, tried=TRIED, **changes):
    setting = ExecutionSetting(**{"micro_tokens": tokens, "is_repeating": True, **changes})
    return cannot_win(setting, LayerPlan(num_recomputed=num_recomputed), tried, 28)


def test_what_recomputing_costs_decides():
    assert ask(8192, 17)  # 27,818 when it was timed
    assert not ask(8192, 0)
    assert not ask(8192, 3)


def test_a_search_that_knows_too_little_tries():
    assert not ask(4096, 17, TRIED[:1])
    assert not ask(8192, 17, TRIED[:1] + TRIED[3:])
    assert not ask(8192, 17, is_repeating=False)


def test_what_moves_beside_a_pass_follows_from_the_card_not_from_launches():
    needs = Needs(
        tokens=1024, fixed_bytes=0, token_bytes=1, layer_bytes=1, input_bytes=0, pass_s=0.2,
        bus_bytes_per_s=1e9,
    )  # fmt: skip
    assert without_launches(needs, []) == needs
    assert without_launches(needs, TRIED[3:]) == needs
    assert without_launches(needs, TRIED).pass_s == 1.5 * 1024 / 33_532
