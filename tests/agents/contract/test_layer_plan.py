"""What the layers do follows from measured needs; the plan fits the card, the bus and the host."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from agents.contract.layer_plan import LayerPlan, Needs, choose_plan

GIB = 1 << 30
NEEDS = Needs(
    tokens=2048,
    fixed_bytes=GIB / 2,
    token_bytes=GIB / 4096,
    layer_bytes=GIB / 5 / 2048,
    input_bytes=0.0,
    pass_s=0.2,
    bus_bytes_per_s=25e9,
)
"""Half a GiB and half a GiB for 2,048 tokens, and a fifth for each layer that keeps."""


def plan(room_gib, *, tokens=2048, host_gib=8.0, needs=NEEDS, recompute="auto", may_move=True):
    return choose_plan(
        needs,
        tokens=tokens,
        num_layers=32,
        room_bytes=room_gib * GIB,
        host_bytes=int(host_gib * GIB),
        recompute=recompute,
        may_move=may_move,
    )


def test_a_big_card_keeps_everything():
    assert plan(1 + 32 / 5 + 0.01) == LayerPlan()


def test_a_small_card_moves_what_the_bus_takes_and_recomputes_the_rest():
    found = plan(2)
    assert found.num_moved == int(0.2 / 3 * 25e9 * 0.85 / (GIB / 5)) == 6
    assert found.num_recomputed == 32 - 6 - 4  # one layer in flight, and four that keep
    assert plan(2, may_move=False) == LayerPlan(num_recomputed=27)


def test_inputs_of_layers_that_recompute_take_their_part_of_the_bus():
    inputs = replace(NEEDS, input_bytes=NEEDS.layer_bytes / 12)
    assert plan(2, needs=inputs).num_moved == 4


def test_a_slow_card_moves_everything():
    slow = replace(NEEDS, pass_s=4.0, bus_bytes_per_s=12e9)
    assert plan(2, needs=slow) == LayerPlan(num_moved=29)
    assert plan(2, needs=slow, host_gib=2.0) == LayerPlan(num_moved=10, num_recomputed=18)
    assert plan(2, needs=slow, host_gib=2.9) == LayerPlan(num_moved=14, num_recomputed=15)


def test_few_layers_move_where_there_is_room_for_one():
    """With as much of the room as three inputs take, which are not fetched so early then."""
    assert plan(1 + 0.21) == LayerPlan(num_moved=6, num_recomputed=26)
    assert plan(1 + 0.19) == LayerPlan(num_recomputed=32)
    inputs = replace(NEEDS, input_bytes=NEEDS.layer_bytes / 12)
    assert plan(1 + 0.16, needs=inputs) == LayerPlan(num_moved=4, num_recomputed=28)


def test_without_a_bus_layers_keep_or_recompute():
    assert plan(2, needs=replace(NEEDS, bus_bytes_per_s=0.0)) == LayerPlan(num_recomputed=27)


def test_the_spec_decides_where_it_says_so():
    assert plan(9, recompute="all") == LayerPlan(num_recomputed=32)
    assert plan(2, recompute="none") == LayerPlan(num_moved=29)
    assert plan(2, recompute="none", host_gib=1.0) is None


def test_what_does_not_fit_is_no_plan():
    assert plan(0.9) is None
    assert plan(1.4, tokens=4096) is None


@given(
    room_gib=st.floats(0.5, 20),
    tokens=st.integers(64, 16384),
    host_gib=st.floats(0, 20),
    bus=st.floats(0, 60e9),
)
def test_every_plan_fits(room_gib, tokens, host_gib, bus):
    needs = replace(NEEDS, pass_s=0.5, bus_bytes_per_s=bus)
    found = plan(room_gib, tokens=tokens, host_gib=host_gib, needs=needs)
    if found is None:
        assert room_gib < 0.5 + tokens / 4096 + 1e-6
        return
    num_kept = 32 - found.num_moved - found.num_recomputed
    assert num_kept >= 0
    layer_gib = tokens / 2048 / 5
    on_card = num_kept + found.count_in_flight(32)
    assert 0.5 + tokens / 4096 + on_card * layer_gib <= room_gib + 1e-6
    assert found.num_moved * layer_gib <= host_gib + 1e-6
