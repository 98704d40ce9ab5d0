"""A core without a cluster: it publishes believable snapshots, for the window's tests and pictures.

It answers the actions that the window does; each answer changes the state of the fake and publishes
what a real core would. `calls` records them. Everything is deterministic.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from agents.contract.data import DataPreview
from agents.contract.environments import KeptItem
from agents.contract.messages import Progress
from agents.contract.node import (
    Calibration,
    EnvironmentReport,
    GpuFacts,
    GpuSample,
    InterfaceFacts,
    LogTail,
    NodeFacts,
    Sample,
)
from agents.contract.requests.hub import NodeTokenPlace
from agents.contract.run import AttemptStatus
from agents.contract.spec import DataSpec, RunSpec
from app.artifact import ArtifactCopy, ArtifactSnapshot, Verdict
from app.artifacts.deletion import DeletedArtifact
from app.artifacts.estimates.plan import ExportPlan
from app.artifacts.serving import ServeCommand, ServedFolder, serve_commands
from app.core import artifacts, hub, library, new_nodes, nodes, plans, runs
from app.core.action import Action, CoreApi, Report, Result
from app.errors import HostKeyUnknown, LoginRefused, NodeUnreachable, RunsPrograms, UserError
from app.events import (
    ArtifactsChanged,
    CheckpointSnapshot,
    EvaluationRecord,
    EventHub,
    ExportedModel,
    FoundRun,
    FoundRunsChanged,
    LinkSnapshot,
    LogArrived,
    NodeChanged,
    NodeRemoved,
    NodeSnapshot,
    RankProgress,
    RankTrace,
    RunChanged,
    RunDeleted,
    RunEvent,
    RunEventArrived,
    RunSnapshot,
    SampleArrived,
    SaveResult,
    StepRecord,
    StepsArrived,
    TraceResult,
    TraceRow,
)
from app.flows.node_list import NodeLine, NodeOutcome
from app.hub.hub_item import FetchedRepo, HubFit, HubResults, PcCache
from app.hub.node_tokens import NodeToken
from app.interruption import Interruption
from app.library.recipes import Recipe, list_recipes
from app.library.sent_files import SentFiles
from app.nodes.discovery.candidate import PcCandidate
from app.nodes.key_copy import CopiedKey
from app.nodes.node import SshAddress, parse_ssh_target
from app.nodes.ssh_hosts import SshHost
from app.planning.accuracy.forecast_accuracy import ForecastComparison
from app.planning.candidate import Caveats, Plan
from app.planning.upgrades import Upgrades
from app.provisioning.check_row import CheckRow
from app.provisioning.system_repairs import synchronise_clock
from app.provisioning.windows.offer import ScriptOptions, WindowsScript, offer_script, save_script
from app.runfile.run_file import format_run
from app.runs.inputs.left_out import DataCount
from app.runs.journals.logs import LogFile
from app.settings import Value
from tests.fakes.artifacts import CARD, past_artifacts
from tests.fakes.chats import FakeChats
from tests.fakes.cluster import make_preview
from tests.fakes.exports import make_export_plan
from tests.fakes.hub_items import hub_fits, hub_items
from tests.fakes.plans import make_comparison, make_plan_of_all, make_upgrades
from tests.fakes.repairs import FakeRepairs
from tests.fakes.rows import FakeData
from tests.fakes.storage import FakeStorage

GIB = 1024**3
NOW_S = 1_795_000_000.0
FINGERPRINT = "SHA256:m0Cq8Zc6yTq5PZ8k0mHjJbqk3f1oYV2oV3Uq1m9cX3E"
PASSWORD = "correct horse"
SPEC = RunSpec(
    name="support-chat",
    model="meta-llama/Llama-2-7b-hf",
    data=DataSpec(train="chats.jsonl"),
    batch_sequences=24,
)


def make_node(
    name: str, *cards: tuple[str, int], state: str = "online", **values: Any
) -> NodeSnapshot:
    """Return a node with the given (card name, GiB); without cards it has a CPU."""
    facts = NodeFacts(
        hostname=name,
        os="Ubuntu 24.04.3 LTS",
        kernel="6.8.0-87",
        python="3.12.3",
        architecture="x86_64",
        cpu="AMD Ryzen 7 7700 8-Core Processor",
        num_cores=16,
        memory_bytes=32 * GIB,
        disk_bytes=930 * GIB,
        disk_free_bytes=412 * GIB,
        gpus=tuple(
            GpuFacts(
                uuid=f"GPU-{name}-{index}",
                index=index,
                name=card,
                memory_bytes=gib * GIB,
                driver="580.95.05",
                cuda="13.0",
                capability="8.9",
                power_limit_w=220.0,
            )
            for index, (card, gib) in enumerate(cards)
        ),
        interfaces=(
            InterfaceFacts(name="enp5s0", address="192.168.1.20", mtu=1500, speed_mbit=1000),
        ),
        address="192.168.1.20",
        wall_s=NOW_S + 0.004,
        environment=EnvironmentReport(
            python="/home/anna/env/bin/python", python_version="3.12.3", fits=True
        ),
    )
    values.setdefault("facts", facts)
    values.setdefault("last_seen_s", NOW_S)
    return NodeSnapshot(
        name=name,
        transport="ssh",
        address=f"anna@192.168.1.{20 + len(name)}:22",
        state=state,  # type: ignore[arg-type]
        round_trip_s=0.0007,
        **values,
    )


def home_cluster() -> tuple[NodeSnapshot, ...]:
    """Return three mismatched PCs and one that is lost."""
    return (
        make_node("alpha", ("NVIDIA GeForce RTX 5070 Ti", 16)),
        make_node("beta", ("NVIDIA GeForce RTX 3090", 24), ("NVIDIA GeForce RTX 3090", 24)),
        make_node("gamma", ("NVIDIA GeForce RTX 4070 Laptop GPU", 8)),
        make_node("delta"),
        make_node(
            "epsilon",
            ("NVIDIA GeForce RTX 3070 Ti", 8),
            state="unreachable",
            problem="epsilon does not answer since 12 s: no route to host 192.168.1.27.",
            hint="Is the PC on, and awake? Try: ping 192.168.1.27",
            last_seen_s=NOW_S - 12,
        ),
    )


def sample_of(node: NodeSnapshot, second: int, *, busy: bool = True) -> Sample:
    """Return believable figures of one node at a second."""
    assert node.facts is not None
    phase = second * 0.21 + len(node.name)
    wave = math.sin(phase) * 0.5 + math.sin(phase * 2.7) * 0.3
    gpus = tuple(
        GpuSample(
            uuid=gpu.uuid,
            index=gpu.index,
            name=gpu.name,
            memory_used_bytes=int((gpu.memory_bytes or 0) * (0.82 + 0.03 * wave if busy else 0.05)),
            memory_total_bytes=gpu.memory_bytes,
            utilisation=min(1.0, 0.93 + 0.08 * wave) if busy else 0.0,
            temperature_celsius=(70.0 + 3 * gpu.index + 4 * wave) if busy else 38.0,
            power_w=(188.0 + 24 * wave) if busy else 14.0,
            power_limit_w=220.0,
            clock_mhz=2400.0,
            fan=None,
            throttle=("power limit",) if busy and gpu.index == 1 and second % 40 > 5 else (),
        )
        for gpu in node.facts.gpus
    )
    return Sample(
        time_s=NOW_S - 399.02 + second,
        seq=second,
        gpus=gpus,
        cpu_utilisation=0.16 + 0.05 * wave if gpus else 0.88 + 0.1 * wave,
        cpu_temperature_celsius=None if gpus else 71.0 + 4 * wave,
        memory_used_bytes=int(GIB * (11.4 + wave)),
        memory_total_bytes=32 * GIB,
        disk_used_bytes=518 * GIB,
        disk_total_bytes=930 * GIB,
        network_in_bytes_per_s=41e6 + 1e7 * wave,
        network_out_bytes_per_s=40e6 + 1e7 * wave,
    )


def loss_at(step: int) -> float:
    """Return the fake run's loss: it falls, with noise."""
    noise = math.sin(step * 12.9898) * 43758.5453
    return 0.82 + 1.75 * math.exp(-step / 130) + 0.13 * (noise - math.floor(noise) - 0.5)


def make_steps(count: int, attempts: tuple[int, ...] = (1,)) -> list[StepRecord]:
    """Return `count` steps; every attempt but the first resumes 12 steps before the last end."""
    records: list[StepRecord] = []
    per_attempt = count // len(attempts)
    first = 1
    for attempt in attempts:
        for step in range(first, first + per_attempt):
            noise = math.sin(step * 78.233) * 0.5
            tokens = 3150.0 + 120 * noise - (900 if step % 97 == 0 else 0)
            records.append(
                StepRecord(
                    attempt=attempt,
                    step=step,
                    time_s=NOW_S - (count - len(records)) * 7.5,
                    loss=loss_at(step),
                    learning_rate=2e-4 * min(1.0, step / 20),
                    gradient_norm=0.8 + 0.2 * noise,
                    tokens_per_s=tokens if attempt == 1 else tokens * 0.8,
                    step_s=7.6,
                    wait_s=0.6,
                )
            )
        first += per_attempt - 12
    return records


def make_run(run_id: str, name: str, state: str, **values: Any) -> RunSnapshot:
    """Return a run; the figures default to those of a running one."""
    values.setdefault("nodes", ("alpha", "beta", "gamma"))
    values.setdefault("attempt", 1)
    values.setdefault("created_s", NOW_S - 5400)
    values.setdefault("started_s", NOW_S - 5380)
    return RunSnapshot(
        run_id=run_id,
        name=name,
        state=state,  # type: ignore[arg-type]
        spec=replace(SPEC, name=name),
        **values,
    )


def past_interruptions() -> tuple[Interruption, ...]:
    """Return a node that was lost and rejoined, a hot GPU, and a rank that is being recovered."""
    rest, whole = ("alpha", "beta"), ("alpha", "beta", "gamma")
    lost = Interruption(
        kind="loss", state="recovered", step=233, nodes=whole, last_step_s=NOW_S - 3120,
        reason="node gamma was lost at step 233; newest checkpoint is step 230",
        noticed_s=NOW_S - 3116, resumed_s=NOW_S - 3109, resumed_nodes=rest, resume_step=230,
        training_s=NOW_S - 3091,
    )  # fmt: skip
    back = Interruption(
        kind="rejoin", state="recovered", step=260, nodes=rest, last_step_s=NOW_S - 2710,
        reason="gamma answers again and is fit to train", noticed_s=NOW_S - 2708,
        resumed_s=NOW_S - 2701, resumed_nodes=whole, resume_step=260, training_s=NOW_S - 2684,
    )  # fmt: skip
    now = Interruption(
        kind="loss", state="resumed", step=412, nodes=whole, last_step_s=NOW_S - 21,
        reason="Rank 2 on beta was killed by the kernel: its memory ran out",
        noticed_s=NOW_S - 20, resumed_s=NOW_S - 14, resumed_nodes=whole, resume_step=410,
    )  # fmt: skip
    hot = Interruption(
        kind="heat", state="recovered", step=371, nodes=("beta",), last_step_s=None,
        reason="GPU 1 of beta (NVIDIA GeForce RTX 4070 Laptop GPU): 96 \u00b0C",
        noticed_s=NOW_S - 900, resumed_nodes=("beta",), resume_step=371, training_s=NOW_S - 812,
    )  # fmt: skip
    return lost, back, hot, now


def running_run(num_steps: int = 412) -> RunSnapshot:
    """Return the run that the pictures show."""
    places = (("alpha", "cuda:0", 0.33), ("beta", "cuda:0", 0.25), ("beta", "cuda:1", 0.25))
    ranks = tuple(
        RankProgress(
            rank=rank,
            node=node,
            device=device,
            state="running",
            step=num_steps,
            phase="training",
            tokens_per_s=3150.0 * share,
            step_s=7.62,
            input_s=0.05,
            compute_s=7.62 - 0.4 * (rank + 1) - 0.25,
            wait_s=0.4 * (rank + 1),
            optimizer_s=0.2,
            mfu=0.44 - 0.03 * rank,
            memory_bytes=int((6.2 + 2 * rank) * GIB),
            memory_unpacked_bytes=int(rank * 4.2 * GIB),
            memory_reserved_bytes=int((7.0 + 5.2 * rank) * GIB),
            share=share,
        )
        for rank, (node, device, share) in enumerate((*places, ("gamma", "cuda:0", 0.17)))
    )
    return make_run(
        "support-chat-7f3a",
        "support-chat",
        "running",
        attempt=2,
        step=num_steps,
        total_steps=1200,
        loss=loss_at(num_steps),
        first_loss=loss_at(1),
        learning_rate=1.7e-4,
        tokens_per_s=3148.0,
        mfu=0.402,
        eta=0.964,
        evaluation_loss=1.104,
        perplexity=3.016,
        remaining_s=(1200 - num_steps) * 7.62,
        ranks=ranks,
        newest_checkpoint_step=400,
        phase="training",
    )


def past_runs() -> tuple[RunSnapshot, ...]:
    """Return one run in each state that stays."""
    return (
        make_run(
            "poems-11c0",
            "poems",
            "interrupted",
            step=812,
            total_steps=1500,
            loss=1.244,
            newest_checkpoint_step=800,
            created_s=NOW_S - 90_000,
            message="Node gamma was lost at step 812: it does not answer any more.",
            hint="Resume on alpha and beta from the checkpoint of step 800.",
        ),
        make_run(
            "recipes-a0d2",
            "recipes",
            "done",
            step=600,
            total_steps=600,
            loss=0.913,
            created_s=NOW_S - 200_000,
            ended_s=NOW_S - 190_000,
            nodes=("alpha",),
        ),
        make_run(
            "typo-44e1",
            "first-try",
            "failed",
            created_s=NOW_S - 260_000,
            nodes=("alpha", "beta"),
            message="Rank 1 on beta ended while loading: chats.jsonl, line 18 is not JSON.",
            hint="Correct line 18, then start again.",
        ),
    )


Answers = dict[type[Action[Any]], Callable[[Any, Report], Awaitable[Any]]]


def answers_of(fake: object) -> Answers:
    """Return the methods of a fake by the class of the action that each takes."""
    methods = (getattr(fake, name) for name in vars(type(fake)) if not name.startswith("_"))
    kinds = ((typing.get_type_hints(one).get("action"), one) for one in methods if callable(one))
    return {kind: one for kind, one in kinds if kind is not None}


class FakeNodes:
    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def all(self, action: nodes.ListNodes, report: Report) -> tuple[NodeSnapshot, ...]:
        return tuple(self._core.node_map.values())

    async def calibrations(
        self, action: nodes.ListCalibrations, report: Report
    ) -> dict[str, Calibration]:
        return self._core.calibration_map.get(action.name, {})

    async def calibrate(
        self, action: nodes.CalibrateNode, report: Report
    ) -> tuple[Calibration, ...]:
        await self._core.act("nodes.calibrate", action.name)
        report(Progress(message="measuring memory"))
        found = Calibration(
            card="NVIDIA GeForce RTX 5070 Ti", matrix_flops_per_s=8.1e13,
            memory_bytes_per_s=7.9e11, to_host_bytes_per_s=2.5e10, measured_s=NOW_S,
        )  # fmt: skip
        self._core.calibration_map[action.name] = {f"GPU-{action.name}-0": found}
        return (found,)

    async def connect(self, action: nodes.ConnectNodes, report: Report) -> None:
        self._core.calls.append(("nodes.connect", action.names))

    async def wsl_distros(self, action: nodes.ListDistros, report: Report) -> tuple[str, ...]:
        return self._core.distros

    async def resolve(self, action: new_nodes.ResolveHost, report: Report) -> SshHost:
        wanted = parse_ssh_target(action.target)
        command = self._core.proxy_commands.get(wanted.host)
        if command is not None and command not in action.agreed:
            raise RunsPrograms(command)
        address = SshAddress(
            host=wanted.host.lower(),
            port=wanted.port or 22,
            user=wanted.user or "me",
            key=action.key,
            proxy_command=command,
        )
        return SshHost(address=address, notes=())

    async def add(self, action: new_nodes.AddNode, report: Report) -> NodeSnapshot:
        await self._core.act("nodes.add", action.name, str(action.address), action.accept_host_key)
        is_known = str(action.address) in self._core.known_hosts
        if (
            isinstance(action.address, SshAddress)
            and action.accept_host_key != FINGERPRINT
            and not is_known
        ):
            raise HostKeyUnknown(str(action.address), FINGERPRINT)
        if (
            isinstance(action.address, SshAddress)
            and action.address.host in self._core.locked_hosts
        ):
            raise LoginRefused(
                f"{action.address} accepts none of our keys", account=str(action.address)
            )
        self._core.put_node(self._core.newcomer or make_node(action.name))
        return self._core.node_map[action.name]

    async def discover(
        self, action: new_nodes.DiscoverPcs, report: Report
    ) -> tuple[PcCandidate, ...]:
        await self._core.act("nodes.discover")
        return self._core.candidates

    async def add_list(
        self, action: new_nodes.AddNodeList, report: Report
    ) -> tuple[NodeOutcome, ...]:
        await self._core.act(
            "nodes.add_list", tuple(x.name for x in action.lines), dict(action.accepted)
        )
        shown, typed = action.accepted, action.passwords
        return tuple(
            self._outcome(x, shown.get(x.target), typed.get(x.target, "")) for x in action.lines
        )

    def _outcome(self, line: NodeLine, accepted: str | None, password: str) -> NodeOutcome:
        if line.problem:
            return NodeOutcome(line=line, state="failed", message=line.problem)
        if accepted != FINGERPRINT:
            shown = f"{line.target} shows {FINGERPRINT}"
            return NodeOutcome(
                line=line, state="confirm", message=shown, host=line.target, fingerprint=FINGERPRINT
            )
        address = parse_ssh_target(line.target)
        if address.host in self._core.locked_hosts and password != PASSWORD:
            said = "does not accept this password" if password else "accepts none of our keys"
            said = f"{line.target} {said}"
            return NodeOutcome(line=line, state="failed", message=said, account=line.target)
        self._core.put_node(make_node(line.name))
        return NodeOutcome(line=line, state="added", message=line.target)

    async def copy_key(self, action: new_nodes.CopyKey, report: Report) -> CopiedKey:
        await self._core.act("nodes.copy_key", str(action.address), action.accept_host_key)
        if action.password != PASSWORD:
            raise LoginRefused("The password is wrong", account=str(action.address))
        self._core.locked_hosts.discard(action.address.host)
        self._core.known_hosts.add(str(action.address))
        return CopiedKey(
            address=action.address,
            host=action.address,
            key="/home/me/.ssh/id_ed25519",
            is_new=True,
            was_there=False,
        )

    async def take_back_key(self, action: new_nodes.TakeBackKey, report: Report) -> bool:
        await self._core.act("nodes.take_back_key", action.name)
        return True

    async def address(self, action: nodes.GetAddress, report: Report) -> Any:
        return self._core.node_map[action.name].address

    async def set_address(self, action: new_nodes.SetAddress, report: Report) -> NodeSnapshot:
        await self._core.act(
            "nodes.set_address", action.name, str(action.address), action.accept_host_key
        )
        return self._core.node_map[action.name]

    async def wake(self, action: nodes.WakeNode, report: Report) -> NodeSnapshot:
        await self._core.act("nodes.wake", action.name)
        self._core.put_node(make_node(action.name))
        return self._core.node_map[action.name]

    async def find(self, action: new_nodes.FindNode, report: Report) -> NodeSnapshot:
        await self._core.act("nodes.find", action.name)
        return self._core.node_map[action.name]

    async def refresh(self, action: nodes.RefreshNode, report: Report) -> NodeSnapshot:
        await self._core.act("nodes.refresh", action.name)
        return self._core.node_map[action.name]

    async def remove(self, action: nodes.RemoveNode, report: Report) -> None:
        await self._core.act("nodes.remove", action.name)
        del self._core.node_map[action.name]
        self._core.events.publish(NodeRemoved(action.name))

    async def setup(self, action: nodes.SetUpNode, report: Report) -> EnvironmentReport:
        await self._core.act(
            "nodes.setup", action.name, *([action.accept_index] if action.accept_index else [])
        )
        report(Progress(message="Collecting torch==2.13.0"))
        return EnvironmentReport(python="/env/bin/python", python_version="3.12.3", fits=True)

    async def kept(self, action: nodes.ListLeftovers, report: Report) -> tuple[KeptItem, ...]:
        await self._core.act("nodes.kept", action.name)
        used = KeptItem(
            kind="environment", name="environment-1", size_bytes=6 << 30, used_s=1.0,
            needed_by="training",
        )  # fmt: skip
        old = KeptItem(kind="wheels", name="wheels-2", size_bytes=3 << 30, used_s=1.0)
        return (used, old)

    async def prune(self, action: nodes.PruneNode, report: Report) -> int:
        await self._core.act("nodes.prune", action.name, *action.items)
        return 3 << 30

    async def check(self, action: nodes.CheckNodes, report: Report) -> tuple[CheckRow, ...]:
        await self._core.act("nodes.check", action.names)
        rows = [
            CheckRow(
                check="versions",
                node=name,
                peer=None,
                status="pass",
                message="torch 2.13.0, Python 3.12.3: the same everywhere",
            )
            for name in action.names or tuple(self._core.node_map)
        ]
        bad = CheckRow(
            check="reachability",
            node="alpha",
            peer="beta",
            status="fail",
            message="alpha cannot open a connection to beta on port 41877: no answer in 3 s",
            fix="sudo ufw allow from 192.168.1.0/24",
            evidence="connect 192.168.1.12:41877: timed out",
        )
        clock = CheckRow(
            check="clock",
            node="beta",
            status="warn",
            message="42 s behind this PC's clock",
            fix="sudo timedatectl set-ntp true",
            repair=synchronise_clock(),
        )
        for row in (*rows, bad, clock):
            report(nodes.RowChecked(row))
        report(Progress(message="3 of 9 links measured"))
        known = list(self._core.node_map)
        self._core.link_list = [
            LinkSnapshot(
                node=one,
                peer=other,
                round_trip_s=0.0004,
                bytes_per_s=9e6 if "beta" in (one, other) else 117e6,
                measured_s=NOW_S,
            )
            for one in known
            for other in known
            if one != other and (one, other) != ("alpha", "beta")
        ]
        return (*rows, bad, clock)

    async def logs(self, action: nodes.ReadNodeLogs, report: Report) -> tuple[LogTail, ...]:
        await self._core.act("nodes.logs", action.name)
        if self._core.node_map[action.name].state != "online":
            raise NodeUnreachable(f"{action.name} is off", "Turn it on")
        lines = "".join(f"step {n} loss {2.4 - n / 400:.4f}\n" for n in range(380, 413))
        return tuple(
            LogTail(
                run_id="support-chat-7f3a",
                attempt=attempt,
                name="rank-0.log",
                size_bytes=182_000,
                written_s=NOW_S - 4000 * (2 - attempt),
                text=f"{action.name}: loading the model\n{lines}",
            )
            for attempt in (2, 1)
            if action.name != "delta"
        )

    async def windows_script(
        self, action: nodes.MakeWindowsScript, report: Report
    ) -> WindowsScript:
        await self._core.act("nodes.windows_script", action.name)
        return offer_script({}, action.name, action.options or ScriptOptions())

    async def save_windows_script(self, action: nodes.SaveWindowsScript, report: Report) -> Path:
        await self._core.act("nodes.save_windows_script", action.script.node, action.file.name)
        return save_script(action.script, action.file)

    async def links(self, action: nodes.ListLinks, report: Report) -> tuple[LinkSnapshot, ...]:
        return tuple(self._core.link_list)


class FakeRuns:
    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def all(self, action: runs.ListRuns, report: Report) -> tuple[RunSnapshot, ...]:
        return tuple(self._core.run_map.values())

    async def steps(self, action: runs.ReadSteps, report: Report) -> list[StepRecord]:
        return list(self._core.step_map.get(action.run_id, []))

    async def evaluations(
        self, action: runs.ReadEvaluations, report: Report
    ) -> list[EvaluationRecord]:
        return list(self._core.evaluation_map.get(action.run_id, []))

    async def events(self, action: runs.ReadRunEvents, report: Report) -> list[RunEvent]:
        return list(self._core.event_map.get(action.run_id, []))

    async def interruptions(
        self, action: runs.ListInterruptions, report: Report
    ) -> tuple[Interruption, ...]:
        return self._core.interruption_map.get(action.run_id, ())

    async def data_preview(
        self, action: runs.ReadDataPreview, report: Report
    ) -> DataPreview | None:
        return self._core.preview_map.get(action.run_id)

    async def forecast_comparison(
        self, action: runs.CompareForecast, report: Report
    ) -> ForecastComparison | None:
        return self._core.comparison_map.get(action.run_id)

    async def plan(self, action: runs.PlanRun, report: Report) -> Plan:
        self._core.calls.append(("runs.plan", action.spec, action.ask_remote))
        if self._core.plan_gate is not None:
            await self._core.plan_gate.wait()
        if isinstance(self._core.plan_answer, Exception):
            raise self._core.plan_answer
        return self._core.plan_answer

    async def upgrades(self, action: plans.RankUpgrades, report: Report) -> Upgrades:
        self._core.calls.append(("plans.upgrades", action.spec))
        if isinstance(self._core.upgrades_answer, Exception):
            raise self._core.upgrades_answer
        return self._core.upgrades_answer

    async def list_caveats(self, action: runs.ListCaveats, report: Report) -> Caveats:
        self._core.calls.append(("runs.list_caveats", action.spec))
        answer = self._core.plan_answer
        if isinstance(answer, Exception):
            return Caveats(parts=None, problem=str(answer))
        return Caveats(parts=answer.parts, limits=answer.limits)

    async def logs(self, action: runs.FindLogs, report: Report) -> tuple[LogFile, ...]:
        assert self._core.log_folder is not None
        files = []
        for (owner, number), data in sorted(self._core.logs_map.items()):
            if owner == action.run_id and action.rank in (None, number):
                path = self._core.log_folder / f"{action.run_id}-{number}.log"
                path.write_bytes(data)
                found = action.attempt or self._core.run_map[action.run_id].attempt
                files.append(LogFile(rank=number, node="alpha", attempt=found, path=path))
        # An attempt that is listed here has its own logs; all others share those above.
        for (owner, of_attempt, number, node), data in self._core.old_logs_map.items():
            if owner == action.run_id and action.attempt == of_attempt:
                files = [file for file in files if file.node == node]
                path = self._core.log_folder / f"{action.run_id}-{of_attempt}-{number}.log"
                path.write_bytes(data)
                if action.rank in (None, number):
                    files.append(LogFile(rank=number, node=node, attempt=of_attempt, path=path))
        return tuple(files)

    async def start(self, action: runs.StartRun, report: Report) -> RunSnapshot:
        await self._core.act("runs.start", action.spec, action.accept_left_out)
        run = make_run(f"{action.spec.name}-0001", action.spec.name, "launching", phase="loading")
        run = replace(run, spec=action.spec)
        report(runs.RunAnnounced(run.run_id))
        self._core.put_run(run)
        return run

    async def stop(self, action: runs.StopRun, report: Report) -> None:
        await self._core.act("runs.stop", action.run_id)
        self._core.put_run(
            replace(self._core.run_map[action.run_id], state="stopped", remaining_s=None)
        )

    async def take_over(self, action: runs.TakeOverRun, report: Report) -> RunSnapshot:
        await self._core.act("runs.take_over", action.run_id)
        return self._core.run_map[action.run_id]

    async def stop_on(self, action: runs.StopRunOnNode, report: Report) -> AttemptStatus:
        await self._core.act("runs.stop_on", action.run_id, action.node)
        return AttemptStatus(run_id=action.run_id, attempt=1, node=action.node, state="stopped")

    async def find(self, action: runs.FindRuns, report: Report) -> tuple[FoundRun, ...]:
        return self._core.found

    async def adopt(self, action: runs.AdoptRun, report: Report) -> RunSnapshot:
        await self._core.act("runs.adopt", action.run_id, action.node, action.files)
        self._core.put_found(r for r in self._core.found if r.run_id != action.run_id)
        self._core.put_run(make_run(action.run_id, "adopted", "running"))
        return self._core.run_map[action.run_id]

    async def ignore(self, action: runs.IgnoreRun, report: Report) -> None:
        await self._core.act("runs.ignore", action.run_id, action.node)
        self._core.put_found(r for r in self._core.found if r.run_id != action.run_id)

    async def save(self, action: runs.SaveCheckpoint, report: Report) -> SaveResult:
        await self._core.act("runs.save", action.run_id)
        return SaveResult(step=412, stall_s=0.018, seconds=2.1)

    async def trace(self, action: runs.TraceRun, report: Report) -> TraceResult:
        await self._core.act("runs.trace", action.run_id, action.num_steps)
        rows = (TraceRow(name="ampere_bf16_gemm", count=672, seconds=4.1, share=0.61),)
        trace = RankTrace(
            rank=0, first_step=413, last_step=415, path="/mirror/trace.json.gz",
            size_bytes=7_300_000, top=rows,
        )  # fmt: skip
        return TraceResult(first_step=413, ranks=(trace,), is_complete=True)

    async def resume(self, action: runs.ResumeRun, report: Report) -> None:
        await self._core.act(
            "runs.resume", action.run_id, action.checkpoint, action.nodes, action.verify_steps
        )
        run = self._core.run_map[action.run_id]
        self._core.put_run(
            replace(run, state="running", attempt=run.attempt + 1, message="", hint="")
        )

    async def delete(self, action: runs.EraseRun, report: Report) -> None:
        await self._core.act("runs.delete", action.run_id)
        del self._core.run_map[action.run_id]
        self._core.events.publish(RunDeleted(action.run_id))

    async def refresh(self, action: runs.RefreshRun, report: Report) -> RunSnapshot:
        return self._core.run_map[action.run_id]

    async def sync(self, action: runs.SyncRun, report: Report) -> None:
        self._core.calls.append(("runs.sync", action.run_id))

    async def checkpoints(
        self, action: runs.FindCheckpoints, report: Report
    ) -> tuple[CheckpointSnapshot, ...]:
        self._core.calls.append(("runs.checkpoints", action.run_id, action.verify))
        return tuple(
            CheckpointSnapshot(
                run_id=action.run_id or "",
                step=step,
                created_s=NOW_S - (412 - step) * 7.6,
                size_bytes=164 * 1024**2,
                nodes=("alpha", "beta"),
                verified=True if action.verify else None,
                stall_s=0.018,
            )
            for step in (400, 320, 240)
        )


class FakeArtifacts:
    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def get(self, action: artifacts.GetArtifact, report: Report) -> ArtifactSnapshot:
        return self._core.artifact_map[action.name]

    async def plan_export(self, action: artifacts.PlanExport, report: Report) -> ExportPlan:
        return make_export_plan(action.request.to, action.request.types)

    async def check_export_folders(
        self, action: artifacts.CheckExportFolders, report: Report
    ) -> None:
        used = [folder for folder in action.folders if folder in self._core.used_folders]
        if used:
            raise UserError(f"{used[0]} is not empty", "Name a new or empty folder.")

    async def check_calibration(self, action: artifacts.CheckCalibration, report: Report) -> int:
        await self._core.act("artifacts.check_calibration", action.path)
        return 1234

    async def export(self, action: artifacts.ExportModel, report: Report) -> ExportedModel:
        await self._core.act("artifacts.export", action.request, action.out)
        report(Progress(phase="merge", message="merging layer 12 of 32"))
        verdicts = [
            Verdict(
                name=kind, keep=kind != "Q3_K_M", kl=0.0021, control_kl=0.017, perplexity=5.61,
                problems=("Its perplexity is 4.1 % above the original's.",) * (kind == "Q3_K_M"),
                original_perplexity=5.58, size_bytes=4_080_000_000, tokens_per_s=47.0,
            )
            for kind in action.request.types
        ]  # fmt: skip
        return ExportedModel(path=action.out, verdicts=tuple(verdicts))

    async def all(
        self, action: artifacts.ListArtifacts, report: Report
    ) -> tuple[ArtifactSnapshot, ...]:
        self._core.calls.append(("artifacts.all", action.run_id))
        every = tuple(self._core.artifact_map.values())
        return tuple(a for a in every if action.run_id in (None, a.origin and a.origin.run_id))

    async def card(self, action: artifacts.ReadCard, report: Report) -> str:
        return CARD if self._core.artifact_map[action.name].folder() else ""

    async def add(self, action: artifacts.AddArtifact, report: Report) -> ArtifactSnapshot:
        await self._core.act("artifacts.add", action.folder, action.name)
        return next(iter(self._core.artifact_map.values()))

    async def copy(self, action: artifacts.CopyArtifact, report: Report) -> ArtifactSnapshot:
        await self._core.act("artifacts.copy", action.name, action.to)
        report(Progress(message=f"copying {action.name} to {action.to}: 1.2 GiB of 3.8 GiB"))
        found = self._core.artifact_map[action.name]
        added = ArtifactCopy(kind="node", place=action.to, path="artifacts/x", made_s=NOW_S)
        return self._core.put_artifact(replace(found, copies=(*found.copies, added)))

    async def push(self, action: artifacts.PushArtifact, report: Report) -> ArtifactSnapshot:
        await self._core.act("artifacts.push", action.name, action.hub_id, action.private)
        found = self._core.artifact_map[action.name]
        added = ArtifactCopy(
            kind="hub", place=action.hub_id, path=f"https://hub/{action.hub_id}", made_s=NOW_S
        )
        return self._core.put_artifact(replace(found, copies=(*found.copies, added)))

    async def verify(self, action: artifacts.VerifyArtifact, report: Report) -> ArtifactSnapshot:
        await self._core.act("artifacts.verify", action.name)
        found = self._core.artifact_map[action.name]
        copies = tuple(replace(one, checked_s=NOW_S) for one in found.copies)
        return self._core.put_artifact(replace(found, copies=copies))

    async def delete(self, action: artifacts.DeleteCopies, report: Report) -> DeletedArtifact:
        await self._core.act("artifacts.delete", action.name, action.place, action.even_last)
        found = self._core.artifact_map[action.name]
        if action.place is None:
            del self._core.artifact_map[action.name]
            self._core.events.publish(ArtifactsChanged())
        else:
            left = tuple(one for one in found.copies if one.place != action.place)
            self._core.put_artifact(replace(found, copies=left))
        gone = tuple(one.place for one in found.copies if action.place in (None, one.place))
        return DeletedArtifact(
            label=action.name,
            freed_bytes=found.size_bytes,
            deleted=gone,
            is_forgotten=action.place is None,
        )

    async def serve_commands(
        self, action: artifacts.ListServeCommands, report: Report
    ) -> tuple[ServeCommand, ...]:
        self._core.maybe_fail()
        found = self._core.artifact_map[action.name]
        files = tuple((kind, f"support-chat-{kind}.gguf") for kind in found.types)
        config = {"architectures": ["LlamaForCausalLM"]}
        folder = ServedFolder(
            path=found.folder() or "", config=config, files=files,
            templates={kind: "TEMPLATE" for kind in found.types[:1]},
            template_problems={
                kind: "it puts the system prompt inside the first turn" for kind in found.types[1:]
            },
        )  # fmt: skip
        return serve_commands(found, folder)

    async def write_modelfile(
        self, action: artifacts.WriteModelfile, report: Report
    ) -> Path | None:
        await self._core.act("artifacts.write_modelfile", action.name, action.command.runtime)
        if action.command.modelfile is None:
            return None
        return Path(
            self._core.artifact_map[action.name].folder() or "", action.command.modelfile_name
        )


class FakeLibrary:
    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def recipes(self, action: library.ListRecipes, report: Report) -> tuple[Recipe, ...]:
        return (*list_recipes(), *self._core.own_recipes)

    async def save_recipe(self, action: library.SaveRecipe, report: Report) -> Recipe:
        self._core.calls.append(("library.save_recipe", action.title, action.spec))
        self._core.maybe_fail()
        self._core.own_recipes.append(
            Recipe(
                name="own",
                title=action.title,
                purpose="Your own.",
                text="",
                spec=action.spec,
                is_own=True,
            )
        )
        return self._core.own_recipes[-1]

    async def delete_recipe(self, action: library.DeleteRecipe, report: Report) -> Recipe:
        self._core.calls.append(("library.delete_recipe", action.name))
        return self._core.own_recipes.pop()

    async def run_file_text(self, action: library.FormatRunFile, report: Report) -> str:
        return format_run(action.spec)

    async def read_run_file(self, action: library.ReadRunFile, report: Report) -> RunSpec:
        self._core.calls.append(("library.read_run_file", action.path))
        self._core.maybe_fail()
        return replace(SPEC, name=action.path.stem, seed=7)

    async def list_sent(
        self, action: library.ListSentFiles, report: Report
    ) -> tuple[SentFiles, ...]:
        return ()

    async def write_run_file(self, action: library.WriteRunFile, report: Report) -> Path:
        self._core.calls.append(("library.write_run_file", action.spec, action.path))
        return action.path

    async def preview(self, action: library.PreviewData, report: Report) -> DataPreview:
        await self._core.act("library.preview", action.spec, action.node, action.whole, action.part)
        return make_preview(whole=action.whole)

    async def count_left_out(
        self, action: library.CountLeftOut, report: Report
    ) -> tuple[DataCount, ...]:
        self._core.calls.append(("library.count_left_out", action.spec))
        name = Path(action.spec.data.train).name
        return (DataCount(part="train", name=name, found=self._core.count_answer),)

    async def find_missing(self, action: library.FindMissing, report: Report) -> dict[str, str]:
        return {
            key: "There is no such file."
            for key, n in action.names.items()
            if n in self._core.missing
        }


class FakeHub:
    def __init__(self, core: FakeCore) -> None:
        self._core = core

    async def search(self, action: hub.SearchHub, report: Report) -> HubResults:
        self._core.calls.append(("hub.search", action.kind, action.words, action.limit))
        gate = self._core.hub_gates.get(action.words)
        if gate is not None:
            await gate.wait()
        if self._core.hub_answer is not None:
            if isinstance(self._core.hub_answer, Exception):
                raise self._core.hub_answer
            return self._core.hub_answer
        words = action.words.strip().lower()
        items = tuple(
            item for item in hub_items() if item.kind == action.kind and words in item.name.lower()
        )
        return HubResults(items=items[: action.limit], has_more=len(items) > action.limit)

    async def judge(self, action: hub.JudgeFits, report: Report) -> tuple[HubFit, ...]:
        fits = {fit.model: fit for fit in hub_fits()}
        unknown = "Unknown shape: the hub gives no config of it"
        found = [
            fits.get(name, HubFit(model=name, verdict="unknown", text=unknown))
            for name in action.models
        ]
        for fit in found:
            report(fit)
        return tuple(found)

    async def fetch(self, action: hub.FetchFromHub, report: Report) -> FetchedRepo:
        await self._core.act("hub.fetch", action.kind, action.name, action.node)
        report(Progress(message=f"downloading {action.name}: 34 % of 14.2 GiB"))
        if self._core.fetch_gate is not None:
            await self._core.fetch_gate.wait()
        return FetchedRepo(kind=action.kind, name=action.name, pc=action.node)

    async def cached(self, action: hub.ListCaches, report: Report) -> tuple[PcCache, ...]:
        return (PcCache(pc=""),)

    async def find_token(self, action: hub.FindToken, report: Report) -> str:
        return self._core.token_place

    async def describe_token(self, action: hub.DescribeToken, report: Report) -> str:
        places = {"kept": "in ~/.cache/huggingface/token, mode 0600", "environment": "in HF_TOKEN"}
        return places.get(self._core.token_place, "")

    async def save_token(self, action: hub.SaveToken, report: Report) -> str:
        await self._core.act("hub.save_token", action.token)
        self._core.token_place = "kept"
        return "anna"

    async def delete_token(self, action: hub.DeleteToken, report: Report) -> tuple[NodeToken, ...]:
        await self._core.act("hub.delete_token")
        self._core.token_place = "none"
        return await self.remove_token(hub.RemoveToken(), report)

    async def node_tokens(
        self, action: hub.ListNodeTokens, report: Report
    ) -> tuple[NodeToken, ...]:
        return tuple(self._core.node_token_map.values())

    async def send_token(self, action: hub.SendToken, report: Report) -> tuple[NodeToken, ...]:
        await self._core.act("hub.send_token")
        return self._put_tokens("none", "same")

    async def remove_token(self, action: hub.RemoveToken, report: Report) -> tuple[NodeToken, ...]:
        await self._core.act("hub.remove_token")
        return self._put_tokens("same", "none")

    def _put_tokens(self, before: NodeTokenPlace, after: NodeTokenPlace) -> tuple[NodeToken, ...]:
        for name, one in self._core.node_token_map.items():
            if one.place == before:
                self._core.node_token_map[name] = NodeToken(node=name, place=after)
        return tuple(self._core.node_token_map.values())


@dataclass
class FakeCore:
    """The fake. Used on the bridge's thread, as the real one is."""

    node_map: dict[str, NodeSnapshot] = field(default_factory=dict)
    run_map: dict[str, RunSnapshot] = field(default_factory=dict)
    found: tuple[FoundRun, ...] = ()
    """Runs on nodes that are not this home's."""
    step_map: dict[str, list[StepRecord]] = field(default_factory=dict)
    evaluation_map: dict[str, list[EvaluationRecord]] = field(default_factory=dict)
    plan_answer: Plan | Exception = field(default_factory=make_plan_of_all)
    upgrades_answer: Upgrades | Exception = field(default_factory=make_upgrades)
    plan_gate: asyncio.Event | None = None
    """A plan waits for it."""
    comparison_map: dict[str, ForecastComparison] = field(default_factory=dict)
    calibration_map: dict[str, dict[str, Calibration]] = field(default_factory=dict)
    preview_map: dict[str, DataPreview] = field(default_factory=dict)
    count_answer: DataPreview = field(default_factory=lambda: make_preview(num_rows=400))
    """Rows of any data."""
    artifact_map: dict[str, ArtifactSnapshot] = field(default_factory=dict)
    link_list: list[LinkSnapshot] = field(default_factory=list)
    event_map: dict[str, list[RunEvent]] = field(default_factory=dict)
    interruption_map: dict[str, tuple[Interruption, ...]] = field(default_factory=dict)
    logs_map: dict[tuple[str, int], bytes] = field(default_factory=dict)
    old_logs_map: dict[tuple[str, int, int, str], bytes] = field(default_factory=dict)
    """Logs of earlier attempts: run id, attempt, rank and node -> text."""
    """(run_id, rank) -> the log."""
    log_folder: Path | None = None
    events: EventHub = field(default_factory=EventHub)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    answers: Answers = field(default_factory=dict)
    """How each action is answered; a test may put its own answer here."""
    delay_s: float = 0.0
    distros: tuple[str, ...] = ()
    candidates: tuple[PcCandidate, ...] = ()
    locked_hosts: set[str] = field(default_factory=set)
    """Hosts that let none of our keys in before one is copied with PASSWORD."""
    known_hosts: set[str] = field(default_factory=set)
    """Addresses whose fingerprint is stored since our key was copied there."""
    proxy_commands: dict[str, str] = field(default_factory=dict)
    """Host -> program that ~/.ssh/config names for it."""
    newcomer: NodeSnapshot | None = None
    """What the next node that is added turns out to be."""
    own_recipes: list[Recipe] = field(default_factory=list)
    """How long every slow action takes."""
    confirmed_key: str = ""
    failure: Exception | None = None
    """Raised by the next action, once."""
    loop: asyncio.AbstractEventLoop | None = None
    chosen: dict[str, object] = field(default_factory=dict)
    own_settings: dict[str, dict[str, Value]] = field(default_factory=dict)
    """Of nodes, by their names."""
    """What was set in the settings."""
    token_place: str = "none"
    hub_answer: HubResults | Exception | None = None
    """Answer to every search of the hub; None: from `hub_items`."""
    hub_gates: dict[str, asyncio.Event] = field(default_factory=dict)
    """Searches for these words wait."""
    fetch_gate: asyncio.Event | None = None
    """A download waits for it."""
    node_token_map: dict[str, NodeToken] = field(default_factory=dict)
    notice: str = ""
    missing: set[str] = field(default_factory=set)
    """Names of models and data that are not there."""
    used_folders: set[Path] = field(default_factory=set)
    """Where no export can come to."""

    def __post_init__(self) -> None:
        self.repairs = FakeRepairs(lambda: NOW_S)
        self.storage = FakeStorage(self.calls)
        self.chats = FakeChats(self.calls)
        self.data = FakeData(calls=self.calls)
        own = [fake(self) for fake in (FakeNodes, FakeRuns, FakeArtifacts, FakeLibrary, FakeHub)]
        for fake in (*own, self.repairs, self.storage, self.chats, self.data):
            self.answers |= answers_of(fake)

    async def do(self, action: Action[Result], report: Report | None = None) -> Result:
        answer = self.answers[type(action)]
        return await answer(action, report or (lambda event: None))  # type: ignore[no-any-return]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[CoreApi]:
        self.loop = asyncio.get_running_loop()
        yield self

    @property
    def settings(self) -> FakeCore:
        return self

    def get(self, key: str, node: str = "") -> Value:
        value = self.own_settings.get(node, {}).get(key, self.chosen.get(key))
        return cast(Value, value)

    def set(self, key: str, value: object) -> None:
        self.chosen[key] = value

    def of_nodes(self, key: str) -> dict[str, Value]:
        return {node: own[key] for node, own in self.own_settings.items() if key in own}

    def set_of_node(self, node: str, key: str, value: object | None) -> None:
        self.maybe_fail()
        own = self.own_settings.setdefault(node, {})
        if value is None:
            own.pop(key, None)
        else:
            own[key] = cast(Value, value)

    def on_loop(self, call: Callable[..., Any], *args: Any) -> None:
        """Let a test publish from its own thread."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(call, *args)

    def put_artifact(self, artifact: ArtifactSnapshot) -> ArtifactSnapshot:
        self.artifact_map[artifact.label] = artifact
        self.events.publish(ArtifactsChanged())
        return artifact

    def put_node(self, node: NodeSnapshot) -> None:
        self.node_map[node.name] = node
        self.events.publish(NodeChanged(node))

    def put_found(self, found: Iterable[FoundRun]) -> None:
        self.found = tuple(found)
        self.events.publish(FoundRunsChanged(self.found))

    def put_run(self, run: RunSnapshot) -> None:
        self.run_map[run.run_id] = run
        self.events.publish(RunChanged(run))

    def put_sample(
        self, node: str, second: int, *, busy: bool = True, replayed: bool = False
    ) -> None:
        sample = sample_of(self.node_map[node], second, busy=busy)
        self.events.publish(SampleArrived(node, sample, replayed))

    def put_steps(self, run_id: str, steps: tuple[StepRecord, ...]) -> None:
        self.step_map.setdefault(run_id, []).extend(steps)
        self.events.publish(StepsArrived(run_id, steps))

    def put_log(self, run_id: str, attempt: int, rank: int, data: bytes) -> None:
        old = self.logs_map.get((run_id, rank), b"")
        self.logs_map[run_id, rank] = old + data
        self.events.publish(LogArrived(run_id, attempt, f"rank-{rank}.log", len(old), data))

    def put_event(self, event: RunEvent) -> None:
        self.event_map.setdefault(event.run_id, []).append(event)
        self.events.publish(RunEventArrived(event))

    async def act(self, *call: Any) -> None:
        self.calls.append(call)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        self.maybe_fail()

    def maybe_fail(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure


def busy_core(log_folder: Path | None = None) -> FakeCore:
    """Return a cluster in the middle of a day's work, with five minutes of history to publish."""
    core = FakeCore(log_folder=log_folder)
    core.node_map = {node.name: node for node in home_cluster()}
    run = running_run()
    core.run_map = {item.run_id: item for item in (run, *past_runs())}
    core.step_map[run.run_id] = make_steps(424, (1, 2))
    core.evaluation_map[run.run_id] = [
        EvaluationRecord(attempt=one.attempt, step=one.step, loss=one.loss * 1.12, perplexity=3.0)
        for one in core.step_map[run.run_id]
        if one.step % 50 == 0 and one.loss is not None
    ]
    core.comparison_map[run.run_id] = make_comparison()
    places = ("same", "none", "other", "unknown")
    for name, place in zip(core.node_map, places, strict=False):
        core.node_token_map[name] = NodeToken(node=name, place=place)  # type: ignore[arg-type]
    core.artifact_map = {one.label: one for one in past_artifacts(NOW_S)}
    core.event_map[run.run_id] = [
        RunEvent(run_id=run.run_id, time_s=NOW_S - age, severity=severity, text=text)  # type: ignore[arg-type]
        for age, severity, text in (
            (5380, "info", "Started on alpha, beta and gamma."),
            (5310, "info", "Measured shares: alpha 33 %, beta 25 % and 25 %, gamma 17 %."),
            (3720, "error", "gamma was lost at step 212: it does not answer any more."),
            (3660, "warning", "Resumed from the checkpoint of step 200; 88 s of work were lost."),
            (90, "info", "Checkpoint of step 400 written on alpha and beta."),
        )
    ]
    lines = [
        f"2026-11-21 14:{i // 60 % 60:02d}:{i % 60:02d} step {i} loss {loss_at(i):.4f} "
        f"lr {2e-4:.2e} 3,148 tok/s\n"
        for i in range(1, 400)
    ]
    core.logs_map[run.run_id, 0] = "".join(lines).encode("ascii")
    return core


def publish_history(core: FakeCore, seconds: int = 300) -> None:
    """Publish samples of the last seconds of every node that is online; call on the loop."""
    carrying = {"alpha", "beta", "gamma"}
    for node in core.node_map.values():
        last = 400 if node.state == "online" else 388
        for second in range(400 - seconds, last):
            busy = node.name in carrying
            core.put_sample(node.name, second, busy=busy, replayed=False)
