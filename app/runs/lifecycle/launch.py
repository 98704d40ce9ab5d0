"""Start a run: check the nodes, send what is missing, then launch on all nodes at once.

Checks that can refuse a run come first: until then it has no id and leaves no trace. Then its id is
recorded and announced, before anything large is sent, and from then on the run stays: a failure
makes it `failed`, with the reason, and it can be resumed. The intent is stored before any node is
asked to launch, so that a master that dies halfway leaves a run that the next one can judge. If one
node cannot launch, the others are stopped again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from agents.contract.messages import to_wire
from agents.contract.requests.attempts import LaunchAttempt
from agents.contract.requests.probes import ChoosePort
from agents.contract.run import (
    AttemptIntent,
    HeatRule,
    MasterIdentity,
    Replay,
    choose_checkpoint_ranks,
)
from agents.contract.spec import RunSpec
from app.errors import NodeUnreachable, RacklessError, RunStopped, UserError
from app.filelock import locked
from app.library.chat_template import settle_template
from app.nodes.credential import make_credential
from app.progress import OnMessage
from app.provisioning.checks.variables import (
    agreed_variables,
    explain_ineffective,
    find_ineffective,
)
from app.provisioning.torch_build import advise_one_build, tried_builds
from app.runs import preflight
from app.runs.inputs import left_out, run_inputs
from app.runs.inputs.shared_inputs import record_places
from app.runs.lifecycle.confirmation import CONFIRM_S, confirm_launch, keeping_launch_alive
from app.runs.lifecycle.election import plan_election
from app.runs.lifecycle.launch_order import (
    LaunchOrder,
    require_not_stopped,
    take_order,
    unless_stopped,
)
from app.runs.lifecycle.rivals import START_LOCK, find_rival, require_no_launch, withdraw
from app.runs.nodes.attempt_status import stop_parts
from app.runs.placement import shares_a_gpu
from app.runs.services import LaunchForecast, Services
from app.storage.runs import AttemptRecord, RunRecord
from app.text import show_list

# Without 0, 1, i, l and o, which are misread when typing an id.
_ID_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"


def make_run_id() -> str:
    """Return a unique id that sorts by time, such as `20261121-141502-k3f`."""
    tail = "".join(secrets.choice(_ID_LETTERS) for _ in range(3))
    return time.strftime("%Y%m%d-%H%M%S-") + tail


async def start_run(
    services: Services,
    spec: RunSpec,
    announced: OnMessage = lambda line: None,
    report: OnMessage = lambda line: None,
    *,
    accept_left_out: bool = False,
) -> str:
    """Launch a new run and return its id.

    Args:
        services: stores and nodes.
        spec: run to start.
        announced: callback with the id after all checks, before anything is sent.
        report: callback with a sentence on each stage.
        accept_left_out: start also without many of the rows.

    Raises:
        UserError: it cannot be started. Before the id is announced, or if another run took a node
            meanwhile, no trace is left; else the run becomes `failed`, and no part of it is left
            on any node.
    """
    nodes = preflight.choose_nodes(spec, services.pool.names())
    preflight.require_supported(spec)
    spec = await asyncio.to_thread(settle_template, spec)
    inputs = await asyncio.to_thread(run_inputs.find_inputs, services, spec)
    report(f"checking {show_list(nodes)}")
    plan = await preflight.plan_launch(services, spec, nodes)
    await run_inputs.require_models_there(services, spec, inputs, plan.nodes)
    # Named, so that a resume keeps the choice and no other node joins later.
    chosen = plan.forecast.nodes if spec.nodes == "all" else ()
    spec = replace(spec, nodes=chosen or spec.nodes)
    for text in (*_describe_choice(plan), *_advise(services, spec, plan)):
        report(text)
    counts = await left_out.count_before_sending(services, spec, inputs, plan, report)
    left_out.settle_losses(counts, report, accepts=accept_left_out)
    run = RunRecord(
        run_id=make_run_id(),
        name=spec.name,
        state="created",
        spec=spec,
        attempt=1,
        nodes=plan.nodes,
        created_s=time.time(),
    )
    with contextlib.ExitStack() as claim:
        # Check and entry under one lock: two starts at once must not both find the nodes free.
        with locked(services.paths.home / START_LOCK):
            require_no_launch(services, plan.nodes)
            claim.enter_context(services.launching(run.run_id))
            services.runs.add(run)
        order = take_order(services, run.run_id)
        announced(run.run_id)
        try:
            order.phase = "sent files"
            async with unless_stopped(services, order):
                folders = await run_inputs.send_inputs(
                    services,
                    plan.nodes,
                    inputs,
                    report,
                    plan,
                    patience_s=services.settings.number("lost_after_s"),
                )
        # BaseException: a cancelled start must not look as if it continued.
        except BaseException as error:
            _fail(services, run, error, "started", "start")
            raise
        report(f"launching on {show_list(plan.nodes)}")
        try:
            async with unless_stopped(services, order):
                await launch(services, run, plan, inputs, folders, order, resume_step=None)
            return run.run_id
        except RunStopped:
            raise
        except UserError:
            rival = await find_rival(services, plan.nodes, run.run_id)
            if rival is None:
                raise
            await withdraw(services, run.run_id, plan.nodes)
    # After the launch claim, whose lock is a file in that folder.
    services.remove_folder(run.run_id)
    raise rival


def _describe_choice(plan: preflight.LaunchPlan) -> Iterator[str]:
    """Yield sentences on the plan that starts, and on what changed since it was shown."""
    if plan.away:
        verb = "takes" if len(plan.away) == 1 else "take"
        yield f"{show_list(plan.away)} cannot be reached and {verb} no part"
    if plan.forecast.plan_id:
        yield f"starting plan {plan.forecast.plan_id}"
    if plan.forecast.changed:
        yield plan.forecast.changed


async def launch(
    services: Services,
    run: RunRecord,
    plan: preflight.LaunchPlan,
    inputs: run_inputs.Inputs,
    folders: dict[str, run_inputs.NodeInputs],
    order: LaunchOrder,
    resume_step: int | None,
    replay: Replay | None = None,
) -> None:
    """Record the intent, then launch attempt `run.attempt` on all nodes at once.

    Raises:
        RunStopped: the user stopped the run meanwhile; no part of it is left.
        UserError: a node could not launch; the others were stopped and the run is `failed`.
    """
    runs = services.runs
    order.phase = "launched its parts"
    master = plan.endpoints[plan.nodes[0]]
    # Only the node of rank 0, where the ranks connect, knows its free ports.
    port = (await services.pool.agent(plan.nodes[0]).ask(ChoosePort(address=master.address))).port
    credential = await asyncio.to_thread(make_credential)
    endpoints = {node: plan.endpoints[node] for node in plan.nodes}
    # Nodes with only the files of their own layers cannot take over those of a lost node.
    is_divided = any(folders[node].has_parts for node in plan.nodes)
    election = None if is_divided else await plan_election(services, run, endpoints)
    keys = await asyncio.to_thread(services.key.sign_launch, run, plan.ranks)
    record_intent(services, run, plan, inputs, order, resume_step)
    _store_forecast(services, run, plan.forecast)
    record_places(services, run.run_id, {node: folders[node].shared for node in plan.nodes})
    try:
        intents = [
            replace(
                _intent(
                    run,
                    plan,
                    node,
                    folders[node],
                    master.address,
                    port,
                    resume_step,
                    services.identity,
                ),
                replay=replay,
                outage_s=services.settings.number("lost_after_s"),
                when_hot=cast(HeatRule, services.settings.get("when_hot", node)),
                credential=credential,
                election=election,
                proof=keys.proof,
                node_seed=keys.seeds[node],
            )
            for node in plan.nodes
        ]
        await _launch_everywhere(services, run, intents, order)
        require_not_stopped(services, order)
    except BaseException as error:
        # Shielded: a cancelled launch must still stop the parts that have started.
        await asyncio.shield(_abort(services, run, plan.nodes, order, error))
        raise
    runs.move(run.run_id, run.attempt, "running", "", "")


def _advise(services: Services, spec: RunSpec, plan: preflight.LaunchPlan) -> list[str]:
    """Return a sentence on each setting that is allowed but probably not intended."""
    # Late: commands that do not start a run begin sooner.
    from app.runfile.advice import advise

    devices = [place.device for place in plan.ranks]
    found = advise(spec, devices, model=run_inputs.known_model(services, spec))
    return [
        *(f"{one.key}: {one.text}" for one in found),
        *_advise_builds(plan),
        *(
            f"nodes: on {name}, {explain_ineffective(one)[0]}"
            for name, ignored in find_ineffective(plan.facts).items()
            for one in ignored
        ),
    ]


def _advise_builds(plan: preflight.LaunchPlan) -> list[str]:
    builds = _builds(plan)
    if len(set(builds.values())) < 2:
        return []
    shown = show_list([f"{name} has {build}" for name, build in builds.items()])
    advice = advise_one_build(plan.facts, builds)
    return [
        f"nodes: their builds of torch differ ({shown}), so they exchange over Gloo, which is "
        f"slower than NCCL on fast links. {advice}"
    ]


def _builds(plan: preflight.LaunchPlan) -> dict[str, str]:
    """Return the known build of torch of each node with GPUs that takes part."""
    used = {place.node for place in plan.ranks if place.device != "cpu"}
    return {name: one for name, one in tried_builds(plan.facts).items() if name in used}


def record_intent(
    services: Services,
    run: RunRecord,
    plan: preflight.LaunchPlan,
    inputs: run_inputs.Inputs,
    order: LaunchOrder,
    resume_step: int | None,
) -> None:
    """Store the launch before any node is asked.

    Raises:
        RunStopped: the user has stopped the run meanwhile.
        UserError: the run has changed since `run` was read.
    """

    def claim(old: RunRecord) -> RunRecord:
        if order.find_stop(old) is not None:
            require_not_stopped(services, order)
        # A stopped run that is stopped again keeps its state, but gets another message.
        if (old.state, old.message) != (run.state, run.message):
            raise UserError(
                f"run {run.run_id} is {old.state} meanwhile, and is not launched",
                f"Resume it: rackless runs resume {run.run_id}",
            )
        # In one step with the check, so that a later stop finds an active run.
        return replace(old, attempt=run.attempt, nodes=plan.nodes, state="launching", ended_s=None)

    services.runs.change(run.run_id, claim)
    services.runs.store.save_attempt(
        AttemptRecord(
            run_id=run.run_id,
            attempt=run.attempt,
            placements=plan.ranks,
            resume_step=resume_step,
            launched_s=time.time(),
            inputs=to_wire(inputs),
            is_signed=True,
        )
    )
    services.runs.move(run.run_id, run.attempt, "launching", "", "")
    at = f" from step {resume_step}" if resume_step else ""
    services.runs.add_event(
        run.run_id, "launched", f"launching attempt {run.attempt} on {show_list(plan.nodes)}{at}"
    )
    for text in _advise(services, run.spec, plan):
        services.runs.add_event(run.run_id, "advice", text)


def _store_forecast(services: Services, run: RunRecord, found: LaunchForecast) -> None:
    """Store the forecast of this attempt, to compare it with the measured speed."""
    if found.forecast is not None:
        services.planning.save_forecast(run.run_id, run.attempt, to_wire(found.forecast))
    for text in found.advice:
        services.runs.add_event(run.run_id, "advice", f"nodes: {text}")
    if found.changed:
        services.runs.add_event(run.run_id, "advice", f"plan: {found.changed}")


def _intent(
    run: RunRecord,
    plan: preflight.LaunchPlan,
    node: str,
    inputs: run_inputs.NodeInputs,
    master_address: str,
    master_port: int,
    resume_step: int | None,
    master: MasterIdentity,
) -> AttemptIntent:
    return AttemptIntent(
        run_id=run.run_id,
        attempt=run.attempt,
        node=node,
        spec=run.spec,
        python=plan.pythons[node],
        ranks=plan.ranks,
        master_address=master_address,
        master_port=master_port,
        address=plan.endpoints[node].address,
        interface=plan.endpoints[node].interface,
        model_path=inputs.model,
        train_path=inputs.train,
        more_paths=inputs.more,
        eval_path=inputs.eval,
        shared=inputs.shared,
        resume_step=resume_step,
        cut=plan.forecast.cut,
        checkpoint_ranks=choose_checkpoint_ranks(plan.ranks, run.spec.checkpoint.copies),
        environ=_environ(plan),
        master=master,
        addresses={name: endpoint.address for name, endpoint in plan.endpoints.items()},
        confirm_s=CONFIRM_S,
    )


def _environ(plan: preflight.LaunchPlan) -> dict[str, str]:
    ranks = plan.ranks
    agreed = agreed_variables(plan.facts)
    if all(place.device == "cpu" for place in ranks):
        return agreed
    # By default CUDA numbers the fastest card first, NVML by slot; both have to name the same card.
    environ = {**agreed, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    # NCCL has no CPU tensors, and refuses two ranks on one GPU and different NCCL versions, which
    # come with different builds of torch. Gloo supports all of that, more slowly.
    mixed = any(place.device == "cpu" for place in ranks)
    needs_gloo = mixed or shares_a_gpu(ranks) or len(set(_builds(plan).values())) > 1
    return {**environ, "RACKLESS_BACKEND": "gloo"} if needs_gloo else environ


async def _launch_everywhere(
    services: Services, run: RunRecord, intents: Sequence[AttemptIntent], order: LaunchOrder
) -> None:
    pool, nodes = services.pool, [intent.node for intent in intents]
    # This process may have been suspended since the last check.
    require_not_stopped(services, order)
    async with keeping_launch_alive(pool, nodes, run.run_id, run.attempt):
        # All answers are awaited before one is raised: `_abort` must not race with a launch.
        answers = await asyncio.gather(
            *(pool.agent(intent.node).ask(LaunchAttempt(intent=intent)) for intent in intents),
            return_exceptions=True,
        )
    order.refused_by = tuple(
        node
        for node, answer in zip(nodes, answers, strict=True)
        if isinstance(answer, UserError) and not isinstance(answer, NodeUnreachable)
    )
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    require_not_stopped(services, order)
    if unsure := await confirm_launch(pool, nodes, run.run_id, run.attempt):
        services.runs.add_event(
            run.run_id,
            "warning",
            f"{show_list(unsure)} cannot be reached since its launch; it ends its part by itself "
            "if it hears nothing soon",
        )


async def _abort(
    services: Services,
    run: RunRecord,
    nodes: Sequence[str],
    order: LaunchOrder,
    error: BaseException,
) -> None:
    try:
        require_not_stopped(services, order)
    except RunStopped as stopped:
        error = stopped  # which cancelled the launch
    left = await stop_parts(services.pool, nodes, run.run_id, run.attempt, grace_s=0.0)
    _fail(services, run, error, "launched", "launch")
    silent = [node for node, problem in left.items() if isinstance(problem, NodeUnreachable)]
    if silent:
        services.runs.add_event(
            run.run_id,
            "warning",
            f"{show_list(silent)} could not be asked to stop its part, which ends by itself",
        )


def _fail(services: Services, run: RunRecord, error: BaseException, done: str, action: str) -> None:
    """Record why an announced run could not be `done`; a resume tries the action again."""
    again = f"Resume it: rackless runs resume {run.run_id}"
    if isinstance(error, RunStopped):
        message = error.message.removeprefix(f"run {run.run_id} was ")
        services.runs.move(run.run_id, run.attempt, "stopped", message, again)
        services.runs.add_event(run.run_id, "requested", message)
        return
    if isinstance(error, UserError):
        message, hint = f"could not be {done}: {error.message}", error.hint or again
    elif isinstance(error, RacklessError):
        message, hint = f"could not be {done}: {error}", "See the agent's log on that node."
    else:
        message, hint = f"the {action} was cancelled", again
    services.runs.move(run.run_id, run.attempt, "failed", message, hint)
    services.runs.add_event(run.run_id, "failed", message)
