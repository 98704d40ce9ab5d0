"""A node of an attempt that lies, with its own key and the attempt's credential.

It may spoil its own part, be named and be left out. Nothing of the others is deleted, stopped,
started or forged, and the honest majority recovers.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from dataclasses import replace
from typing import Any, BinaryIO

import pytest

from agents.contract.election import (
    AttemptClaim,
    ClaimAnswer,
    Closing,
    Fetch,
    NodeState,
    Relaunch,
    is_majority,
    renumber,
)
from agents.contract.mandate import Handover, checkpoint_bytes, closing_bytes, consent_bytes, prove
from agents.contract.regroup import Regroup
from agents.contract.run import AttemptIntent, AttemptLoss, CheckpointInfo, choose_checkpoint_ranks
from agents.contract.run_layout import CLOSED_FILE, REGROUP_FILE, SUPERVISOR_JOURNAL
from agents.contract.signatures import make_seed, sign
from agents.contract.wire import WireError, to_wire
from agents.election.channel import Listener, PeerError
from agents.election.grants import GRANT_S, Grants
from agents.election.member import ElectionMember
from agents.election.part import RULES, Part
from agents.errors import ExpectedError
from agents.node.checkpoints import describe_folder, list_checkpoints
from agents.supervisor.attempt import read_journal
from agents.supervisor.fence import read_fence
from agents.supervisor.sweep import find_processes
from tests.agents.election.conftest import RUN, Nodes

LIAR = "c"


def requests(nodes: Nodes) -> dict[str, dict[str, Any]]:
    """Return a request of every kind, as a liar would send it."""
    forged = forge(nodes, 3900)
    return {
        "state": {},
        "close": to_wire(Closing(reason="the user stopped it", signature="00" * 64)),
        "claim": to_wire(AttemptClaim(attempt=2)),
        "verify": {"step": 20, "attempt": 2},
        "fetch": to_wire(Fetch(step=0, attempt=2, node=LIAR, checkpoint=replace(forged, step=0))),
        "send": {"step": 20, "attempt": 2},
        "launch": to_wire(relaunch(nodes, 2, ("a", "b", LIAR), None)),
        "confirm": {"attempt": 2},
        "regroup": to_wire(Regroup(generation=1, nodes=("b", LIAR), address="127.0.0.3", port=9)),
    }


def forge(nodes: Nodes, step: int, signer: str = LIAR) -> CheckpointInfo:
    """Return a checkpoint that the liar has made up and signed with its own key."""
    manifest = hashlib.sha256(b"made up").hexdigest()
    return CheckpointInfo(
        run_id=RUN,
        step=step,
        attempt=1,
        path=f"runs/{RUN}/checkpoints/step-{step:08d}",
        size_bytes=9,
        manifest_sha256=manifest,
        created_s=9e9,
        verified=True,
        signer=signer,
        signature=sign(nodes.seeds[LIAR], checkpoint_bytes(RUN, 1, step, manifest, signer)),
    )


def relaunch(
    nodes: Nodes, number: int, members: tuple[str, ...], step: int | None, by: str = LIAR
) -> Relaunch:
    """Return the start of an attempt with a consent of each member, all signed by the liar."""
    intent = nodes.intents()[0]
    ranks = renumber(intent.ranks, members)
    loss = AttemptLoss(attempt=1, step=5, ended_s=1.0, resumed_s=2.0)
    assert intent.election is not None
    plan = replace(
        intent.election,
        ports=dict.fromkeys(members, 1),
        losses=(loss,),
        started_by=by,
        reason="a lie",
    )
    consents = {
        name: sign(nodes.seeds[LIAR], consent_bytes(RUN, number, 1, name)) for name in members
    }
    return Relaunch(
        attempt=number,
        ranks=ranks,
        master_address=intent.addresses[members[0]],
        master_port=1,
        resume_step=step,
        checkpoint_ranks=choose_checkpoint_ranks(ranks, 2),
        addresses={name: intent.addresses[name] for name in members},
        plan=plan,
        handover=Handover(attempt=number, replaces=1, consents=consents),
    )


def take_over(nodes: Nodes) -> None:
    """End the election process of the liar, which speaks for it no more."""
    helper = nodes.helper(LIAR)
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    nodes.wait_gone(LIAR)


def snapshot(nodes: Nodes, *names: str) -> dict[str, object]:
    """Return all that a liar must not change on these nodes."""
    found: dict[str, object] = {}
    for name in names:
        home, attempt = nodes.home(name), nodes.attempt(name, 1)
        files = sorted(path for path in home.checkpoints(RUN).rglob("*") if path.is_file())
        found[f"{name} checkpoints"] = [(path, path.read_bytes()) for path in files]
        found[f"{name} attempts"] = sorted(os.listdir(home.run(RUN) / "attempts"))
        found[f"{name} fence"] = read_fence(home, RUN)
        found[f"{name} closed"] = attempt.file(CLOSED_FILE).exists()
        found[f"{name} group"] = attempt.file(REGROUP_FILE).exists()
        found[f"{name} processes"] = sorted(find_processes(attempt.tag))
    return found


def told(nodes: Nodes, name: str, number: int = 1) -> list[dict[str, Any]]:
    lines = read_journal(nodes.attempt(name, number).file(SUPERVISOR_JOURNAL))
    return [line for line in lines if line["kind"] == "peer_request"]


def test_while_the_others_train_no_request_of_a_liar_changes_anything(nodes: Nodes) -> None:
    nodes.launch()
    for name in "ab":
        for step in (20, 40):
            nodes.add_checkpoint(name, step)
    before = snapshot(nodes, "a", "b")
    asked = requests(nodes)
    assert asked.keys() == RULES.keys()
    for receiver in "ab":
        peer = nodes.peer(LIAR, receiver)
        assert peer.ask("state")["part"] == "active"
        assert peer.ask("claim", **asked["claim"])["is_granted"] is False
        assert peer.ask("close", **asked["close"]) == {}
        for kind in asked.keys() - {"state", "claim", "close"}:
            with pytest.raises(PeerError, match="refuses"):
                peer.ask(kind, **asked[kind])
    assert snapshot(nodes, "a", "b") == before
    for name in "ab":
        lines = {line["request"]: line for line in told(nodes, name)}
        assert lines.keys() == asked.keys() - {"state", "close"}
        assert {line["sender"] for line in lines.values()} == {LIAR}
        assert all(line["is_refused"] for line in lines.values())
        assert "fetch of c refused: The part of" in nodes.say(name)


def test_the_credential_alone_asks_nothing(nodes: Nodes) -> None:
    nodes.launch()
    nodes.add_checkpoint("a", 20)
    before = snapshot(nodes, "a")
    known = nodes.peer(LIAR, "a")
    keys = {name: "00" * 32 for name in nodes.names}
    strangers = [
        None,  # as a master of an earlier version would allow
        ElectionMember(RUN, 1, "b", nodes.seeds[LIAR], keys),  # as another node
        ElectionMember(RUN, 1, LIAR, make_seed(), keys),  # with a key of its own
        ElectionMember(RUN, 1, "d", make_seed(), keys),  # as a node of no attempt
        ElectionMember(RUN, 2, LIAR, nodes.seeds[LIAR], keys),  # for another attempt
        ElectionMember("run-2", 1, LIAR, nodes.seeds[LIAR], keys),  # for another run
    ]
    for member in strangers:
        for kind, args in requests(nodes).items():
            with pytest.raises(PeerError, match="must be signed by a node of this attempt"):
                replace(known, member=member).ask(kind, **args)
    assert snapshot(nodes, "a") == before
    assert {line["request"] for line in told(nodes, "a")} == set(RULES)


def test_a_request_is_worth_nothing_twice_or_elsewhere_and_answers_are_signed(nodes: Nodes) -> None:
    liar, a, b = (nodes.member(name) for name in (LIAR, "a", "b"))
    assert liar is not None
    assert a is not None
    assert b is not None
    request = liar.sign_request("a", {"kind": "close", "reason": "x"})
    assert a.check_request(request) == LIAR
    for member, sent in (
        (a, request),
        (b, request),
        (a, {**liar.sign_request("a", {"kind": "close"}), "reason": "more"}),
        (a, {**liar.sign_request("a", {"kind": "close"}), "sender": "b"}),
        (a, {**liar.sign_request("a", {"kind": "close"}), "nonce": 5}),
        (a, {"kind": "close", "sender": LIAR, "seal": "zz"}),
    ):
        with pytest.raises(WireError):
            member.check_request(sent)
    asked = a.sign_request("b", {"kind": "state"})
    answer = b.sign_answer(asked, {"part": "lost"})
    assert a.check_answer("b", asked, answer) == {"part": "lost"}
    for wrong in (
        {**answer, "part": "closed"},
        liar.sign_answer(asked, {"part": "lost"}),
        b.sign_answer(a.sign_request("b", {"kind": "state"}), {"part": "lost"}),
    ):
        with pytest.raises(WireError):
            a.check_answer("b", asked, wrong)


# ------------------------------------------------------------ with a claim


@pytest.fixture
def part(nodes: Nodes) -> Part:
    """The lost part of `b`, whose own election process has ended, with two checkpoints."""
    nodes.patience_s = 0.0
    nodes.launch()
    for name in nodes.names:
        nodes.wait(name, 1, lambda status: any((rank.step or 0) >= 45 for rank in status.ranks))
    helpers = [nodes.helper(name) for name in nodes.names]
    for helper in helpers:
        assert helper is not None
        os.kill(helper, signal.SIGKILL)
    nodes.cut.touch()
    for name in nodes.names:
        nodes.wait(name, 1, lambda status: status.state == "failed")
    for step in (20, 40):
        nodes.add_checkpoint("b", step)
    intent = nodes.attempt("b", 1).read_intent()
    assert intent is not None
    return Part(nodes.attempt("b", 1), intent)


def refused(part: Part, kind: str, args: dict[str, Any], sender: str = LIAR) -> str:
    with pytest.raises((ExpectedError, PeerError, WireError)) as caught:
        part.ask(kind, args, sender)
    return str(getattr(caught.value, "message", caught.value))


def steps_of(nodes: Nodes, name: str) -> list[int]:
    return [info.step for info in list_checkpoints(nodes.home(name), RUN)]


def test_only_the_holder_of_a_claim_prepares_and_starts_an_attempt(
    nodes: Nodes, part: Part
) -> None:
    asked = requests(nodes)
    for kind in ("verify", "fetch", "launch", "confirm"):
        assert "has granted no claim of that attempt" in refused(part, kind, asked[kind])
    assert part.ask("claim", {"attempt": 2}, "a")["is_granted"]
    assert part.ask("claim", {"attempt": 3}, LIAR)["is_granted"] is False
    assert part.ask("claim", {"attempt": 10**6}, "a")["is_granted"] is False, "the last number"
    for kind in ("verify", "fetch", "launch", "confirm"):
        assert "has granted the attempt to a" in refused(part, kind, asked[kind])
    assert part.ask("verify", {"step": 40, "attempt": 2}, "a")["verified"]
    assert "has granted no claim" in refused(part, "verify", {"step": 40, "attempt": 9}, "a")
    assert "not a node of this attempt" in refused(part, "state", {}, "d")


def test_a_holder_that_lies_deletes_and_forges_nothing(nodes: Nodes, part: Part) -> None:
    before = snapshot(nodes, "b")
    assert part.ask("claim", {"attempt": 2}, LIAR)["is_granted"]

    def fetch(info: CheckpointInfo, node: str = LIAR) -> str:
        wanted = Fetch(step=info.step, node=node, attempt=2, checkpoint=info)
        return refused(part, "fetch", to_wire(wanted))

    assert "cannot have saved step 3900" in fetch(forge(nodes, 3900))
    assert "cannot have saved step 0" in fetch(forge(nodes, 0))
    assert "No node of the run has signed" in fetch(forge(nodes, 41, signer="a"))
    assert "No node of the run has signed" in fetch(replace(forge(nodes, 41), signature=""))
    assert "cannot have saved" in fetch(replace(forge(nodes, 41), attempt=2))
    assert "which is newer" in fetch(forge(nodes, 30))
    assert "names no checkpoint" in refused(part, "fetch", {"step": 0, "attempt": 2})
    other = replace(forge(nodes, 41), run_id="run-2", path="runs/run-2/checkpoints/step-00000041")
    assert "names no checkpoint" in fetch(other)
    assert "no intact copy" in fetch(forge(nodes, 41), node="")
    assert "not another node" in fetch(forge(nodes, 41), node="b")
    assert "does not answer" in fetch(forge(nodes, 41), node=LIAR)
    after = snapshot(nodes, "b")
    assert after["b checkpoints"] == before["b checkpoints"]
    assert steps_of(nodes, "b") == [20, 40]


def test_what_a_source_sends_must_be_what_the_writer_signed(nodes: Nodes, part: Part) -> None:
    folder = nodes.add_checkpoint(LIAR, 41)
    info = describe_folder(nodes.home(LIAR), folder, 41)
    sent: dict[str, bytes] = {}

    def answer(request: dict[str, Any], stream: BinaryIO) -> None:
        assert request["kind"] == "send"
        member = nodes.member(LIAR)
        assert member is not None
        stream.write(json.dumps(member.sign_answer(request, {})).encode() + b"\n")
        files = [
            {"path": name, "size_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in sent.items()
        ]
        stream.write(json.dumps({"files": files}).encode() + b"\n" + b"".join(sent.values()))

    peer = part.peers[LIAR]
    listener = Listener(peer.address, peer.port, nodes.credential, answer, nodes.member(LIAR))
    assert part.ask("claim", {"attempt": 2}, LIAR)["is_granted"]
    wanted = to_wire(Fetch(step=41, node=LIAR, attempt=2, checkpoint=info))
    genuine = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in (
        ("state.json", b"other weights"),
        ("__init__.py", b"print('code')"),
        ("../../../x", b"elsewhere"),
        ("manifest.json", b"{}"),
    ):
        sent.clear()
        sent.update({**genuine, name: data})
        assert refused(part, "fetch", wanted)
        assert steps_of(nodes, "b") == [20, 40], name
        left = {path.name for path in nodes.home("b").checkpoints(RUN).iterdir()}
        assert not {name for name in left if "fetched" in name and "partial" not in name}
    sent.clear()
    sent.update(genuine)
    assert part.ask("fetch", wanted, LIAR) == {}
    assert steps_of(nodes, "b") == [20, 40, 41]
    listener.close()


def test_an_intact_checkpoint_of_the_same_step_is_kept_aside(nodes: Nodes, part: Part) -> None:
    own = nodes.home("b").checkpoints(RUN) / "step-00000040"
    content = (own / "state.json").read_bytes()
    folder = nodes.add_checkpoint("a", 40, content="saved at the loss, too")
    info = describe_folder(nodes.home("a"), folder, 40)
    intent = nodes.attempt("a", 1).read_intent()
    assert intent is not None
    source = Part(nodes.attempt("a", 1), intent)
    assert source.ask("claim", {"attempt": 2}, "a")["is_granted"]
    listener = Listener(
        intent.address, source.plan.ports["a"], nodes.credential, source.answer, source.member
    )
    assert part.ask("claim", {"attempt": 2}, "a")["is_granted"]
    wanted = Fetch(step=40, node="a", attempt=2, checkpoint=info)
    assert part.ask("fetch", to_wire(wanted), "a") == {}
    assert (own / "state.json").read_text() == "saved at the loss, too"
    (aside,) = own.parent.glob(".aside-*")
    assert (aside / "state.json").read_bytes() == content
    listener.close()


def test_a_holder_that_lies_starts_nothing_of_others(nodes: Nodes, part: Part) -> None:
    before = snapshot(nodes, "b")
    answer = part.ask("claim", {"attempt": 2}, LIAR)
    own = next(info for info in list_checkpoints(nodes.home("b"), RUN) if info.step == 40)
    start = relaunch(nodes, 2, ("b", LIAR), None)
    ports = {"b": answer["peer_port"], LIAR: 1}
    good = replace(
        start,
        master_port=answer["port"],
        plan=replace(start.plan, **{**vars_of(part.plan), "ports": ports}),
    )

    def launch(**changes: Any) -> str:
        return refused(part, "launch", to_wire(replace(good, **changes)))

    assert "would start from the beginning" in launch()
    assert "its checkpoint" in launch(resume_step=40), "it was not fetched"
    fetched = Fetch(step=40, attempt=2, checkpoint=own)
    assert part.ask("fetch", to_wire(fetched), LIAR) == {}
    good = replace(good, resume_step=40)
    assert "its signature is not valid" in launch(), "the consent of b is the liar's"
    consents = {"b": answer["consent"]}
    assert "its consents" in launch(handover=Handover(attempt=2, replaces=1, consents=consents))
    consents[LIAR] = sign(nodes.seeds[LIAR], consent_bytes(RUN, 2, 1, LIAR))
    handover = Handover(attempt=2, replaces=1, consents=consents)
    good = replace(good, handover=handover)
    ranks = tuple(reversed(good.ranks))
    for what, changes in {
        "ranks": {"ranks": ranks},
        "nodes": {"ranks": renumber(part.intent.ranks, ("a", LIAR))},
        "addresses": {"addresses": {"b": "127.0.0.2", LIAR: "127.0.0.66"}},
        "first node": {"master_address": "127.0.0.66"},
        "port of the ranks": {"master_port": 4444},
        "writers": {"checkpoint_ranks": (0,)},
        "plan": {"plan": replace(good.plan, started_by="a")},
        "ports": {"plan": replace(good.plan, ports={**ports, "b": 4444})},
        "losses": {"plan": replace(good.plan, losses=())},
        "checkpoint": {"resume_step": 20},
    }.items():
        assert f"its {what} must" in launch(**changes)
    stale = Handover(attempt=2, replaces=7, consents=consents)
    assert "its signature is not valid" in launch(handover=stale)
    after = snapshot(nodes, "b")
    assert after["b attempts"] == before["b attempts"] == ["1"]
    # With the consents of a majority, and all else as it was, it is the recovery that it claims.
    assert part.ask("launch", to_wire(good), LIAR) == {}
    intent = nodes.attempt("b", 2).read_intent()
    assert intent is not None
    assert intent.spec == part.intent.spec
    assert intent.proof is not None
    proved = prove(intent.proof, is_majority)
    assert proved is not None
    assert (proved.attempt, proved.nodes) == (2, ("b", LIAR))
    requested = [line["request"] for line in told(nodes, "b") if not line["is_refused"]]
    assert requested == ["claim", "fetch", "launch"]


def vars_of(plan: Any) -> dict[str, Any]:
    loss = AttemptLoss(attempt=1, step=5, ended_s=1.0, resumed_s=2.0)
    return {"started_by": LIAR, "losses": (*plan.losses, loss)}


def test_who_only_claims_delays_the_others_once() -> None:
    now = [0.0]
    grants = Grants(("a", "b", LIAR), lambda: now[0])
    assert not grants.refuse(LIAR)
    grants.grant(LIAR, 2, 0)
    assert grants.refuse("a") == "c is starting the attempt"
    now[0] = GRANT_S - 1
    grants.grant(LIAR, 3, 0)  # again: its time does not begin again
    with grants.using(grants.find(3)):
        now[0] = GRANT_S + 1
        assert grants.passed_over == frozenset(), "while it copies"
    assert grants.passed_over == {LIAR}
    assert grants.find(3) is None
    assert not grants.refuse("a")
    assert "had its time" in grants.refuse(LIAR)
    for name in "ab":
        grants.pass_over(name)
    assert not grants.refuse(LIAR), "all had their time: each may try again"
    # A large checkpoint takes longer to copy.
    grants.grant("a", 4, 20e6 * 1000)
    now[0] += GRANT_S + 900
    assert grants.holder == "a"
    assert grants.passed_over == frozenset()


# ------------------------------------------------------------ the others recover


def test_a_node_that_grants_and_does_not_start_is_left_out_of_the_next_attempt(
    nodes: Nodes,
) -> None:
    nodes.confirm_s = 6.0
    nodes.launch()
    intent = nodes.attempt(LIAR, 1).read_intent()
    assert intent is not None
    take_over(nodes)
    listener = tell_lies(nodes, intent, "quits")
    nodes.lose(LIAR)
    for name in "ab":
        number = wait_later(nodes, name)
        found = nodes.wait(name, number, lambda status: status.is_confirmed and bool(status.ranks))
        assert [place.node for place in found.all_ranks] == ["a", "b"]
    lines = [line["message"] for line in told(nodes, "a") if line["sender"] == LIAR]
    assert [line for line in lines if line.startswith("it is left out: launch: c refuses")]
    started = nodes.attempt("a", wait_later(nodes, "a")).read_intent()
    assert started is not None
    assert started.proof is not None
    assert len(started.proof.handovers) == 2
    assert started.election is not None
    assert [loss.attempt for loss in started.election.losses] == [1], "attempt 2 never trained"
    assert prove(started.proof, is_majority) is not None
    listener.close()


def wait_later(nodes: Nodes, name: str) -> int:
    """Return the number of the attempt after 2; a competing claim may have used up 3."""
    deadline = time.monotonic() + 90
    while True:
        numbers = [int(path.name) for path in nodes.attempt(name, 1).folder.parent.iterdir()]
        if max(numbers) > 2:
            return max(numbers)
        assert time.monotonic() < deadline, nodes.say(name)
        time.sleep(0.1)


@pytest.mark.parametrize("lie", ["closed", "forged", "deaf", "numbers"])
def test_an_honest_majority_recovers_and_leaves_the_liar_out(nodes: Nodes, lie: str) -> None:
    nodes.launch()
    for name in "ab":
        nodes.wait(name, 1, lambda status: any((rank.step or 0) >= 45 for rank in status.ranks))
    for name in "ab":
        for step in (20, 40):
            nodes.add_checkpoint(name, step, writer="a")
    intent = nodes.attempt(LIAR, 1).read_intent()
    assert intent is not None
    take_over(nodes)
    listener = tell_lies(nodes, intent, lie)
    nodes.lose(LIAR)
    for name in "ab":
        found = nodes.wait(name, 2, lambda status: status.is_confirmed and bool(status.ranks))
        assert [place.node for place in found.all_ranks] == ["a", "b"]
        assert steps_of(nodes, name) == [20, 40]
        started = nodes.attempt(name, 2).read_intent()
        assert started is not None
        assert started.resume_step == 40
        assert started.proof is not None
        proved = prove(started.proof, is_majority)
        assert proved is not None
        assert (proved.attempt, proved.nodes) == (2, ("a", "b"))
    listener.close()


def tell_lies(nodes: Nodes, intent: AttemptIntent, lie: str) -> Listener:
    """Answer in place of the liar's election process."""
    forged = forge(nodes, 3900)

    def answer(request: dict[str, Any], stream: BinaryIO) -> dict[str, Any]:
        if request["kind"] == "state":
            part = "closed" if lie == "closed" else "lost"
            fence = 10**6 if lie == "numbers" else 0
            said = Closing(reason="the user stopped it", signature="11" * 64)
            state = NodeState(
                node=LIAR, part=part, is_free=True, step=10**9, fence=fence, closing=said
            )
            return to_wire(state)
        if request["kind"] == "claim" and lie != "deaf":
            number = request["attempt"]
            consent = sign(nodes.seeds[LIAR], consent_bytes(RUN, number, 1, LIAR))
            granted = ClaimAnswer(
                is_granted=True,
                fence=number,
                port=1,
                peer_port=1,
                checkpoints=() if lie == "quits" else (forged, forge(nodes, 41)),
                saved_steps=(42, 43, 3000, 3900),
                generation=9,
                members=("a", LIAR),
                consent=consent,
            )
            return to_wire(granted)
        if request["kind"] == "fetch" and lie == "quits":
            return {}
        if request["kind"] == "verify":
            return to_wire(forge(nodes, request["step"]))
        raise ExpectedError("I do nothing.")

    assert intent.election is not None
    port, deadline = intent.election.ports[LIAR], time.monotonic() + 60
    while True:
        try:
            return Listener(intent.address, port, nodes.credential, answer, nodes.member(LIAR))
        except OSError:  # a connection of another program has this port for a moment
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_stop_counts_with_the_masters_word_alone(nodes: Nodes, part: Part) -> None:
    closed = nodes.attempt("b", 1).file(CLOSED_FILE)
    word = nodes.sign_as_master(closing_bytes(RUN, 1))
    for wrong in (
        Closing(reason="x"),
        Closing(reason="x", signature=nodes.sign_as_master(closing_bytes(RUN, 2))),
        Closing(reason="x", signature=sign(nodes.seeds[LIAR], closing_bytes(RUN, 1))),
        Closing(reason="x", successor=part.intent.proof),
    ):
        assert part.ask("close", to_wire(wrong), LIAR) == {}
        assert not closed.exists()
        state = NodeState(node=LIAR, part="closed", closing=wrong)
        assert part.beliefs is not None
        assert part.beliefs.judge({LIAR: state}, 99) == {}
        assert part.beliefs.judge({LIAR: state}, 99, 0)[LIAR].part == "lost"
    newer = replace(part.intent, attempt=2)
    successor = Closing(reason="x", successor=nodes.prove(newer).proof)
    for right in (successor, Closing(reason="it was stopped", signature=word)):
        state = NodeState(node=LIAR, part="closed", closing=right)
        assert part.beliefs is not None
        assert part.beliefs.judge({LIAR: state}, 99)[LIAR].part == "closed"
    assert part.ask("close", to_wire(right), LIAR) == {}
    assert part.state().part == "closed"
    assert part.state().closing == right, "so that the others believe this node, too"


def test_no_lie_about_a_group_ends_ranks_that_wait(nodes: Nodes) -> None:
    intent = nodes.intents()[0]
    for folder in (nodes.home("a").leases, nodes.home("a").runs):
        folder.mkdir(parents=True)
    part = Part(nodes.attempt("a", 1), intent)
    assert part.beliefs is not None
    honest = NodeState(node="b", part="active", waits=True, step=7)
    for lie in (
        NodeState(node=LIAR, part="active", generation=9, waits=True, step=7),
        NodeState(node=LIAR, part="active", fence=2),
        NodeState(node=LIAR, part="closed", reason="stopped"),
    ):
        found = part.beliefs.judge({"b": honest, LIAR: lie}, 99, 0)
        assert found["b"] == honest
        assert (found[LIAR].part, found[LIAR].waits) == ("lost", False)
    assert part.beliefs.judge({"b": replace(honest, node=LIAR)}, 99) == {}


def test_a_group_is_formed_by_its_first_node_and_leaves_out_no_ranks_that_wait(
    nodes: Nodes,
) -> None:
    intent = nodes.intents()[1]
    part = Part(nodes.attempt("b", 1), intent)
    part.waiting = frozenset({"a", "b", LIAR})
    good = Regroup(generation=1, nodes=("a", "b", LIAR), address="127.0.0.1", port=9)

    def refuse(wanted: Regroup, sender: str) -> str:
        with pytest.raises(ExpectedError) as caught:
            part._require_group(wanted, sender)
        return caught.value.message

    part._require_group(good, "a")
    assert "formed by its first node" in refuse(good, LIAR)
    assert "formed by its first node" in refuse(replace(good, address="127.0.0.66"), "a")
    assert "leaves out c" in refuse(replace(good, nodes=("a", "b")), "a")
    assert "leaves out a" in refuse(replace(good, nodes=("b", LIAR), address="127.0.0.2"), "b")
    assert "not a majority" in refuse(replace(good, nodes=(LIAR, "b")), LIAR)
    assert "not a majority" in refuse(replace(good, nodes=("b",)), "b")
