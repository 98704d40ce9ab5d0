"""A launch is whole or nothing: what is refused leaves no trace, what breaks is stopped again."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from agents.contract.environments import EnvironmentTrial
from agents.contract.model_cut import ModelCut
from agents.contract.node import EnvironmentReport, GpuFacts, GpuUse, LoginVariable, MigGpu
from agents.contract.run import AttemptStatus
from agents.contract.spec import AdapterSpec, DataSpec, RunSpec
from app.errors import AgentBug, NotAvailableYet, RunStopped, UserError
from app.runs.lifecycle.launch import make_run_id, start_run
from app.runs.preflight import require_supported
from app.runs.services import LaunchForecast, Services
from tests.fakes.cluster import ENVIRONMENT, FakeCluster, make_facts
from tests.fakes.resuming import resume_run


def start(services: Services, spec: RunSpec) -> str:
    return asyncio.run(start_run(services, spec))


def refused(services: Services, spec: RunSpec) -> UserError:
    """Return why a run was refused; nothing of it may be left anywhere, nor an id be told."""
    announced: list[str] = []
    with pytest.raises(UserError) as error:
        asyncio.run(start_run(services, spec, announced.append))
    assert announced == []
    assert services.runs.store.all() == ()
    assert not any(services.paths.runs.glob("*"))
    assert not any(node.intents for node in services.pool.nodes.values())
    return error.value


def test_run_ids_sort_by_time_and_differ() -> None:
    ids = [make_run_id() for _ in range(50)]
    assert len(set(ids)) > 45
    assert all(len(run_id) == len("20261121-141502-k3f") for run_id in ids)


def test_launch_tells_every_node_the_same_ranks(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    run_id = start(services, replace(spec, nodes=("gamma", "alpha")))

    run = services.runs.get(run_id)
    assert (run.state, run.nodes, run.attempt) == ("running", ("gamma", "alpha"), 1)
    first, second = cluster["gamma"].intents[0], cluster["alpha"].intents[0]
    assert [place.node for place in first.ranks] == ["gamma", "alpha"]
    assert (first.ranks, first.master_port) == (second.ranks, second.master_port)
    assert (first.node, second.node) == ("gamma", "alpha")
    assert first.master_address == "127.0.0.1"
    assert first.checkpoint_ranks == (0, 1)
    assert first.resume_step is None
    assert first.python == "/env/bin/python"
    assert cluster["beta"].intents == []


def test_model_and_data_are_sent_once_and_without_pickles(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    start(services, spec)
    intent = cluster["beta"].intents[0]
    assert intent.model_path.startswith("/agent/models/model-")
    assert intent.train_path.startswith("/agent/data/chats-")
    assert intent.train_path.endswith("/chats.jsonl")
    assert intent.eval_path is None
    assert len(set(cluster["alpha"].pushed)) == 2
    source = services.runs.store.attempts(services.runs.store.all()[0].run_id)[0].inputs["model"]
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert [entry["path"] for entry in source["files"]] == names


def test_id_is_announced_once_it_is_recorded_before_anything_is_sent(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    announced: list[tuple[str, str, list[str]]] = []

    def take(run_id: str) -> None:
        pushed = [path for node in cluster.nodes.values() for path in node.pushed]
        announced.append((run_id, services.runs.get(run_id).state, pushed))

    run_id = asyncio.run(start_run(services, spec, take))
    assert announced == [(run_id, "created", [])]


@pytest.mark.parametrize(
    "error", [UserError("the disk is full", "Free some."), KeyboardInterrupt()]
)
def test_a_run_whose_id_was_told_stays_with_the_reason_and_can_be_resumed(
    services: Services, cluster: FakeCluster, spec: RunSpec, error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    async def fail(*_: object) -> None:
        raise error

    announced: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(services.pool, "push", fail)
        with pytest.raises(type(error)):
            asyncio.run(start_run(services, spec, announced.append))
    run = services.runs.get(announced[0])
    reason = "the start was cancelled"
    if isinstance(error, UserError):
        reason = "could not be started: the disk is full"
    assert (run.state, run.message) == ("failed", reason)
    assert services.runs.events(run.run_id)[-1].text == reason
    asyncio.run(resume_run(services, run.run_id))
    assert services.runs.get(run.run_id).state == "running"


def test_gpu_node_gets_a_rank_per_gpu_in_slot_order(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cards = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="RTX 3090") for i in (0, 1))
    cluster["alpha"].facts_now = make_facts(gpus=cards)
    start(services, replace(spec, nodes=("alpha:0", "alpha:1")))
    intent = cluster["alpha"].intents[0]
    assert [place.device for place in intent.ranks] == ["cuda:0", "cuda:1"]
    assert intent.environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("other", "passed"), [("Ring", {"NCCL_ALGO": "Ring"}), ("Tree", {})])
def test_ranks_get_a_variable_of_the_logins_if_all_nodes_have_the_same_value(
    services: Services, cluster: FakeCluster, spec: RunSpec, other: str, passed: dict[str, str]
) -> None:
    for node, value in (("alpha", "Ring"), ("beta", other)):
        variable = LoginVariable(name="NCCL_ALGO", value=value)
        cluster[node].facts_now = make_facts(variables=(variable,))
    run_id = start(services, replace(spec, nodes=("alpha", "beta")))
    assert [cluster[node].intents[0].environ for node in ("alpha", "beta")] == [passed] * 2
    said = [e.text for e in services.runs.events(run_id) if "NCCL_ALGO" in e.text]
    assert [text.partition(",")[0] for text in said] == (
        [] if passed else ["nodes: on alpha", "nodes: on beta"]
    )


@pytest.mark.parametrize(
    ("builds", "capability", "advice"),
    [
        (("cu130", "cu126"), "6.1", "rackless nodes setup alpha"),
        (("cu130", "cu126"), "12.0", "No build serves all cards: to use NCCL, leave beta out"),
        (("cu126", "cu126"), "6.1", None),
        (("cu130", ""), "6.1", None),  # an environment that was adopted: its build is not known
    ],
)
def test_nodes_with_several_builds_of_torch_meet_over_gloo_and_it_is_said_how_to_change_that(
    services: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    builds: tuple[str, str],
    capability: str,
    advice: str | None,
) -> None:
    cards = ("8.6" if capability == "6.1" else capability, "6.1")
    for node, build, card in zip(("alpha", "beta"), builds, cards, strict=True):
        trial = EnvironmentTrial(import_s=1.0, torch=f"2.13.0+{build}", devices=())
        gpu = GpuFacts(uuid=node, index=0, name="GPU", driver="580.95", capability=card)
        environment = replace(ENVIRONMENT, trial=trial if build else None)
        cluster[node].facts_now = make_facts(gpus=(gpu,), environment=environment)
    run_id = start(services, replace(spec, nodes=("alpha", "beta")))
    environs = [cluster[node].intents[0].environ for node in ("alpha", "beta")]
    said = [e.text for e in services.runs.events(run_id) if "builds of torch differ" in e.text]
    assert environs[0] == environs[1]
    assert ("RACKLESS_BACKEND" in environs[0]) is (advice is not None)
    assert len(said) == (advice is not None)
    if advice is not None:
        assert environs[0]["RACKLESS_BACKEND"] == "gloo"
        assert "alpha has cu130 and beta has cu126" in said[0]
        assert advice in said[0]


def test_single_takes_the_first_device_alone(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    run_id = start(services, replace(spec, parallel="single"))
    assert services.runs.get(run_id).nodes == ("alpha",)
    assert len(cluster["alpha"].intents[0].ranks) == 1
    assert cluster["beta"].pushed == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_nodes_with_one_folder_are_refused_before_anything_is_sent(
    services: Services, cluster: FakeCluster, spec: RunSpec, is_shared: bool
) -> None:
    for node in ("alpha", "beta"):
        cluster[node].facts_now = make_facts(home_id="1" * 32)
    if not is_shared:  # a clone of a disk has the same id
        start(services, replace(spec, nodes=("alpha", "beta")))
        return
    cluster["beta"].home_marks = cluster["alpha"].home_marks
    error = refused(services, replace(spec, nodes=("alpha", "beta")))
    assert "alpha and beta have one folder for the agent" in error.message
    assert "On beta, set RACKLESS_AGENT_HOME" in error.hint
    assert cluster["alpha"].pushed == cluster["beta"].pushed == []
    assert cluster["alpha"].home_marks == set()
    # Alone, a node is not disturbed.
    start(services, replace(spec, nodes=("alpha",)))


def test_no_nodes(tmp_path: Path, services: Services, spec: RunSpec) -> None:
    services.pool.nodes.clear()
    assert "there are no nodes yet" in refused(services, spec).message


@pytest.mark.parametrize(
    ("nodes", "message"),
    [(("alpha", "delta"), "there is no node delta"), (("delta",), "there is no node delta")],
)
def test_names_that_are_not_right(
    services: Services, spec: RunSpec, nodes: tuple[str, ...], message: str
) -> None:
    assert message in refused(services, replace(spec, nodes=nodes)).message


def test_node_that_lends_its_gpu_to_an_export_is_refused_before_anything_is_sent(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    use = GpuUse(uuid="GPU-0", name="the export of run r-1")
    cluster["beta"].facts_now = replace(cluster["beta"].facts_now, gpu_uses=(use,))
    error = refused(services, spec)
    assert error.message == "node beta is already busy: the export of run r-1 uses its GPU"
    assert "runs stop" not in (error.hint or "")
    assert cluster["alpha"].pushed == []
    own = replace(use, name="run r-1", run_id="r-1")  # its attempt says more about it
    cluster["beta"].facts_now = replace(cluster["beta"].facts_now, gpu_uses=(own,))
    start(services, spec)


def test_node_whose_only_gpu_is_in_mig_mode_does_not_train_on_its_cpu(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    divided = MigGpu(index=0, name="NVIDIA A100", slices=("NVIDIA A100 MIG 1g.5gb",))
    plain = cluster["beta"].facts_now
    cluster["beta"].facts_now = replace(plain, gpus=(), mig_gpus=(divided,))
    error = refused(services, spec)
    assert error.message == (
        "node beta: GPU 0 (NVIDIA A100) is divided by MIG into 1g.5gb, and Rackless trains on "
        "whole GPUs only"
    )
    assert "sudo nvidia-smi -i 0 -mig 0" in error.hint
    assert cluster["alpha"].pushed == []
    other = GpuFacts(uuid="GPU-b", index=1, name="RTX 4070")
    cluster["beta"].facts_now = replace(plain, gpus=(other,), mig_gpus=(divided,))
    start(services, spec)


def test_busy_node_is_named_with_its_run(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cluster["beta"].attempts["other", 1] = AttemptStatus(
        run_id="other", attempt=1, node="beta", state="running"
    )
    error = refused(services, spec)
    assert error.message == "node beta is already busy: run other is running there"
    assert "rackless runs stop other" in error.hint


def busy_with(cluster: FakeCluster, **fields: object) -> None:
    status = AttemptStatus(run_id="r-9", attempt=2, node="beta", state="running")
    cluster["beta"].attempts["r-9", 2] = replace(status, **fields)  # type: ignore[arg-type]


def test_a_node_that_another_master_holds_is_refused_by_its_name_and_how_to_free_it(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    from agents.contract.run import MasterIdentity

    anna = MasterIdentity(host="workshop", user="anna", home="/home/anna/rackless")
    busy_with(cluster, master=anna, spec=replace(spec, name="poems"), started_s=time.time())
    error = refused(services, spec)
    assert error.message.startswith(
        "node beta is already busy: run poems (r-9) of anna on workshop is running there since "
    )
    assert "Stop it on workshop: rackless runs stop r-9." in error.hint
    assert "If that PC is gone, stop it from here: rackless runs stop r-9 --node beta" in error.hint


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"home": "/other"}, "of your other home /other is running", "RACKLESS_HOME=/other"),
        ({}, "run run (r-9) is running", "Stop it: rackless runs stop r-9 --node beta"),
    ],
)
def test_a_run_that_this_home_does_not_know_is_named_with_a_command_that_works(
    services: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    change: dict[str, str],
    message: str,
    hint: str,
) -> None:
    busy_with(cluster, master=replace(services.identity, **change), spec=spec)
    error = refused(services, spec)
    assert message in error.message
    assert hint in error.hint
    assert "rackless runs stop r-9 --node beta" in error.hint
    from app.runs.foreign import stop_on_node

    stopped = asyncio.run(stop_on_node(services, "r-9", "beta"))
    assert (stopped.run_id, stopped.state) == ("r-9", "stopped")
    start(services, spec)


def test_processes_that_lost_their_supervisor_are_seen_before_a_run_gets_an_id(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    busy_with(cluster, state="lost", num_processes=3)
    assert "run r-9 is lost and left processes there" in refused(services, spec).message
    busy_with(cluster, state="lost", num_processes=0)
    start(services, spec)


def test_what_does_not_run_on_a_node_is_not_stopped_there(
    services: Services, cluster: FakeCluster
) -> None:
    from app.runs.foreign import stop_on_node

    with pytest.raises(UserError, match="node beta knows no run r-9"):
        asyncio.run(stop_on_node(services, "r-9", "beta"))
    busy_with(cluster, state="done")
    with pytest.raises(UserError, match="run r-9 is done on node beta"):
        asyncio.run(stop_on_node(services, "r-9", "beta"))


def test_every_launched_attempt_carries_the_name_of_its_master(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    start(services, spec)
    assert cluster["beta"].intents[0].master == services.identity
    assert services.identity.home == str(services.paths.home)


def test_unreachable_node_is_named(services: Services, cluster: FakeCluster, spec: RunSpec) -> None:
    cluster["gamma"].reachable = False
    listed = replace(spec, nodes=("alpha", "beta", "gamma"))
    assert "gamma cannot be reached" in refused(services, listed).message
    said: list[str] = []
    run_id = asyncio.run(start_run(services, replace(spec, nodes="all"), report=said.append))
    assert services.runs.get(run_id).nodes == ("alpha", "beta")
    assert "gamma cannot be reached and takes no part" in said


def test_a_listed_gpu_trains_alone_and_a_missing_one_is_refused(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cards = tuple(GpuFacts(uuid=f"GPU-{i}", index=i, name="RTX 3090") for i in (0, 1))
    cluster["alpha"].facts_now = make_facts(gpus=cards)
    message = refused(services, replace(spec, nodes=("alpha:2",))).message
    assert message == "nodes lists alpha:2, but alpha has no GPU 2"
    run_id = start(services, replace(spec, nodes=("alpha:1",)))
    (rank,) = cluster["alpha"].intents[0].ranks
    assert (rank.rank, rank.local_rank, rank.device, rank.device_id) == (0, 0, "cuda:1", "GPU-1")
    assert services.runs.get(run_id).nodes == ("alpha",)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (None, "node beta has no training environment"),
        (EnvironmentReport(), "node beta has no training environment"),
        (
            EnvironmentReport(python="/p", missing=("peft",), different=("torch 2.0 not 2.13",)),
            "node beta does not fit: peft is missing; torch 2.0 not 2.13",
        ),
    ],
)
def test_environment_that_is_missing_or_wrong(
    services: Services,
    cluster: FakeCluster,
    spec: RunSpec,
    report: EnvironmentReport | None,
    message: str,
) -> None:
    cluster["beta"].facts_now = make_facts(environment=report)
    error = refused(services, spec)
    assert message in error.message
    assert "rackless nodes setup beta" in error.hint


def test_shares_must_fit_the_ranks(services: Services, spec: RunSpec) -> None:
    error = refused(services, replace(spec, shares=(1.0, 2.0)))
    assert "shares has 2 values, but the run has 3 ranks" in error.message


def test_what_is_not_there_yet_is_refused_at_once(services: Services, spec: RunSpec) -> None:
    error = refused(services, replace(spec, parallel="sharded"))
    assert isinstance(error, NotAvailableYet)
    assert "parallel: sharded" in error.message
    full = replace(spec, parallel="streamed", adapter=AdapterSpec(kind="full"))
    assert "but adapter: {kind: full} trains all" in refused(services, full).message


@pytest.mark.parametrize(
    "change", [{"objective": "dpo"}, {"optimizer": "paged_adamw_8bit"}, {"precision": "fp16"}]
)
def test_every_method_of_the_trainer_may_be_asked_for(
    spec: RunSpec, change: dict[str, object]
) -> None:
    require_supported(replace(spec, **change))


def test_broken_data_line_is_named_before_anything_happens(
    services: Services, spec: RunSpec, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n' + '{"text": \n' * 11)
    error = refused(services, replace(spec, data=DataSpec(train=str(broken))))
    assert f"{broken}, line 2: not valid JSON" in error.message


@pytest.mark.parametrize(
    "error", [UserError("the disk is full", "Free some."), AgentBug("a fault")]
)
def test_node_that_cannot_launch_stops_all_others(
    services: Services, cluster: FakeCluster, spec: RunSpec, error: Exception
) -> None:
    cluster["beta"].launch_error = error
    with pytest.raises(type(error)):
        start(services, spec)
    run = services.runs.store.all()[0]
    assert run.state == "failed"
    assert run.message == f"could not be launched: {error}"
    for name in ("alpha", "beta", "gamma"):
        assert cluster[name].stops == [(run.run_id, 1, 0.0)]
    assert all(s.state == "stopped" for n in ("alpha", "gamma") for s in
               cluster[n].attempts.values())  # fmt: skip


def test_launch_that_is_cancelled_stops_all(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    async def scenario() -> None:
        cluster["beta"].launch_gate = asyncio.Event()
        task = asyncio.create_task(start_run(services, spec))
        await cluster["beta"].asked_to_launch.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    run = services.runs.store.all()[0]
    assert (run.state, run.message) == ("failed", "the launch was cancelled")
    assert all(node.stops for node in cluster.nodes.values())
    assert cluster["alpha"].attempts[run.run_id, 1].state == "stopped"


def test_what_takes_long_is_told(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runs.inputs.run_inputs.REPORTED_BYTES", 1)
    told: list[str] = []
    asyncio.run(start_run(services, spec, report=told.append))
    assert (told[0], told[-1]) == (
        "checking alpha, beta and gamma",
        "launching on alpha, beta and gamma",
    )
    sent = [line for line in told if line.startswith("sending")]
    assert "sending the training data to beta: 1 / 2 B" in sent


def test_a_launch_cancelled_before_it_is_asked_for_is_no_run_at_work(
    services: Services, cluster: FakeCluster, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancelled(*args: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr("app.runs.lifecycle.launch._launch_everywhere", cancelled)
    with pytest.raises(asyncio.CancelledError):
        start(services, spec)
    assert services.runs.store.all()[0].state == "failed"


def test_stop_pressed_during_the_launch_is_obeyed(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    def press_stop(run_id: str) -> None:
        services.runs.change(run_id, lambda run: replace(run, stop_asked=True))

    with pytest.raises(RunStopped, match="was stopped while it sent files"):
        asyncio.run(start_run(services, spec, press_stop))
    assert not any(node.intents for node in cluster.nodes.values())
    assert services.runs.store.all()[0].state == "stopped"


def test_second_launcher_of_one_run_is_refused(services: Services) -> None:
    with services.launching("r"):
        assert services.is_launching("r")
        with pytest.raises(UserError, match="being launched right now"), services.launching("r"):
            pass
    assert not services.is_launching("r")
    assert not services.is_launching("never heard of")


async def test_two_starts_at_once_are_one_run_and_no_failed_one(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    """A second click left a run that could not be launched, once all was sent a second time."""
    cluster["beta"].launch_gate = asyncio.Event()
    first = asyncio.create_task(start_run(services, spec))
    second = asyncio.create_task(start_run(services, spec))
    done, (going,) = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    error = done.pop().exception()
    assert isinstance(error, UserError)
    (run,) = services.runs.store.all()
    assert error.message == f"node alpha is already busy: run {run.run_id} is being started there"
    assert f"rackless runs stop {run.run_id}" in error.hint
    cluster["beta"].launch_gate.set()
    assert await going == run.run_id
    assert [path.name for path in services.paths.runs.glob("*")] == [run.run_id]


def test_start_that_another_master_was_faster_than_leaves_no_run(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    async def launch(*asked: object) -> AttemptStatus:
        busy_with(cluster, spec=replace(spec, name="poems"))
        raise UserError("Node beta is already busy: run r-9 uses its CPU.")

    cluster["beta"].launch = launch  # type: ignore[method-assign, assignment]
    announced: list[str] = []
    with pytest.raises(UserError, match=r"busy: run poems \(r-9\) is running there") as error:
        asyncio.run(start_run(services, spec, announced.append))
    assert "rackless runs stop r-9 --node beta" in error.value.hint
    assert services.runs.store.all() == ()
    assert not any(services.paths.runs.glob("*"))
    assert cluster["alpha"].deleted == announced
    assert list(cluster["beta"].attempts) == [("r-9", 2)]


def test_the_plans_cut_goes_to_every_node_and_a_misfit_is_refused_before_anything_is_sent(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    cut = ModelCut(mode="pipeline")
    found = LaunchForecast(
        problem=("parallel: pipeline does not fit on beta: layers 1 to 4", "Add a node.")
    )

    async def forecast(*about: object) -> LaunchForecast:
        return found

    services.hooks.forecast = forecast
    error = refused(services, spec)
    assert (error.message, error.hint) == found.problem
    assert not any(node.pushed for node in cluster.nodes.values())
    found = LaunchForecast(cut=cut)
    run_id = start(services, spec)
    assert [cluster[node].intents[0].cut for node in services.runs.get(run_id).nodes] == [cut] * 3


def test_a_run_that_fits_no_way_on_all_nodes_starts_on_those_of_its_plan(
    services: Services, cluster: FakeCluster, spec: RunSpec
) -> None:
    said = "alpha and gamma take no part: the plan is one GPU on beta"

    async def forecast(*about: object) -> LaunchForecast:
        return LaunchForecast(places=(("beta", "cpu"),), nodes=("beta",), advice=(said,))

    services.hooks.forecast = forecast
    run = services.runs.get(start(services, replace(spec, nodes="all")))
    # Named, so that no other node joins it later.
    assert (run.nodes, run.spec.nodes) == (("beta",), ("beta",))
    assert not cluster["alpha"].pushed
    texts = [event.text for event in services.runs.events(run.run_id)]
    assert f"nodes: {said}" in texts
