"""Whom one can talk to follows from what is there."""

from dataclasses import replace

from app.conversation import Subject
from app.events import CheckpointSnapshot
from app.flows.chat import ChatSettings, choose_columns, make_turn, name_artifact, offer, on_node
from tests.fakes.chats import make_artifact
from tests.fakes.core import running_run

RUN = running_run()
STEPS = [
    CheckpointSnapshot(
        run_id=RUN.run_id, step=step, created_s=1.0, size_bytes=1, nodes=("a",), verified=None
    )
    for step in (320, 400)
]


def test_every_model_of_a_run_is_offered_and_three_stand_side_by_side():
    second = replace(make_artifact(), version=2)
    gone = replace(make_artifact(), name="gone", copies=())
    choices = offer(RUN, STEPS, (second, gone))
    assert [one.label for one in choices] == [
        *("Base, before training", "Step 400", "Step 320"),
        *("GGUF Q8_0, version 2", "GGUF Q4_K_M, version 2"),
    ]
    assert [one.label for one in choose_columns(choices, None)] == [
        *("Base, before training", "Step 400", "GGUF Q8_0, version 2")
    ]
    wanted = Subject(what=RUN.run_id, checkpoint=320)
    assert choose_columns(choices, wanted)[1].label == "Step 320"
    assert offer(None, (), (gone,)) == ()
    gptq = replace(make_artifact(), name="chat-gptq", format="gptq", types=("8-bit",))
    assert [one.label for one in offer(None, (), (gptq,))] == ["GPTQ 8-bit"]
    assert offer(None, (), (gptq,))[0].subject.type is None
    assert choose_columns((), wanted) == ()
    damaged = replace(STEPS[1], verified=False, problem="a: manifest.json cannot be used")
    labels = [one.label for one in offer(RUN, (STEPS[0], damaged), ())]
    assert labels == ["Base, before training", "Step 320"]
    by_folder = name_artifact(Subject(what="/models/support-chat-gguf"), (gone, second))
    assert by_folder == Subject(what="support-chat-gguf:2")
    assert name_artifact(wanted, (second,)) == wanted


def test_a_turn_holds_what_was_said():
    turn = make_turn(ChatSettings(system=" Be short ", top_p=0.9), (("a", "b"),), "c")
    assert [(one.role, one.content) for one in turn.messages] == [
        ("system", "Be short"), ("user", "a"), ("assistant", "b"), ("user", "c"),
    ]  # fmt: skip
    assert turn.top_p == 0.9
    assert len(make_turn(ChatSettings(), (), "c").messages) == 1
    assert on_node(Subject(what="x"), "").node is None
