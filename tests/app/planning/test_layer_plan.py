"""The planner lets layers do what the trainer would."""

from hypothesis import given, settings
from hypothesis import strategies as st

from agents.trainer import tuning
from app.planning.layer_plan import Needs, choose_plan

BYTES = st.floats(0, 1e11)


@settings(max_examples=300, deadline=None)
@given(
    room=BYTES,
    fixed=st.floats(0, 1e9),
    token=st.floats(0, 1e6),
    layer=st.floats(1, 1e6),  # a layer keeps a byte at least
    share=st.floats(0, 1),
    pass_s=st.floats(0, 100),
    bus=st.sampled_from([0.0, 1e9, 12e9, 50e9]),
    host=st.integers(0, 10**11),
    tokens=st.integers(64, 16384),
    num_layers=st.integers(1, 80),
    recompute=st.sampled_from(["auto", "all", "none"]),
    may_move=st.booleans(),
)
def test_plans_are_those_of_the_trainer(
    room, fixed, token, layer, share, pass_s, bus, host, tokens, num_layers, recompute, may_move
):
    same = {
        "fixed_bytes": fixed,
        "token_bytes": token,
        "layer_bytes": layer,
        "input_bytes": share * layer,
        "bus_bytes_per_s": bus,
    }
    limits = {
        "tokens": tokens,
        "num_layers": num_layers,
        "room_bytes": room,
        "host_bytes": host,
        "recompute": recompute,
        "may_move": may_move,
    }
    # The trainer says seconds of a pass over `tokens`; a power of two divides without rounding.
    found = choose_plan(Needs(**same, token_s=pass_s / 2048), **limits)
    expected = tuning.choose_plan(tuning.Needs(**same, tokens=2048, pass_s=pass_s), **limits)
    assert (found is None) == (expected is None)
    if found is not None:
        assert (found.num_recomputed, found.num_moved) == (
            expected.num_recomputed,
            expected.num_moved,
        )
