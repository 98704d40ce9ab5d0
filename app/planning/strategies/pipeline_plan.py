"""Plan pipelines: layers are spread over GPUs, and each micro-batch passes through all of them.

Several pipelines can train data parallel, each as one worker with its share of the batch: seven PCs
as two chains of 3 and 4, if each can hold the model, wait less than one chain of seven.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from agents.contract.model_cut import Stage
from app.planning.candidate import Candidate, GpuPlan, StepParts
from app.planning.hardware.network import gradient_bytes, ring_s, statistics_s
from app.planning.memory.forecast import GIB
from app.planning.memory.gpu import choose_width
from app.planning.plan_context import Case, Worker, gpu_plan, make_candidate
from app.planning.split import split_rows
from app.planning.strategies import pipeline_memory, pipeline_schedule
from app.planning.strategies.trained_layers import give_each_stage_one, list_trained_layers
from app.planning.subsets import compute_best, fastest_together, list_teams
from app.planning.throughput import ModelCost, PlannedPace, arithmetic_share, make_pace

# Parts of a GPU's memory that a pipeline divides among its stages.
_SPLIT_PARTS = ("weights", "constants", "adapter", "gradients", "optimizer")
# Number of chains that are computed in full if there are many GPUs.
_MOST_CHAINS = 2
# Number of PCs up to which a chain is tried in every order, and of GPUs up to which in several.
_ALL_ORDERS, _FEW = 3, 6
# A smaller chain is tried only if its memory exceeds those parts by this factor: activations, the
# CUDA context and uneven stages need the rest.
_ROOM_FACTOR = 1.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """One pipeline: GPUs in order, with the memory and time of their stages."""

    workers: tuple[Worker, ...]
    stages: tuple[GpuPlan, ...]
    """Stages with their share of the layers."""
    stages_s: tuple[float, ...]
    """Duration of both passes of one micro-batch on each stage, in seconds."""
    transfers_s: tuple[float, ...]
    depths: tuple[int, ...]
    fits: bool

    def time(self, num_micro: int) -> pipeline_schedule.PipelineTime:
        """Return the time of a step with this number of micro-batches."""
        return pipeline_schedule.time_pipeline(
            self.stages_s, self.transfers_s, num_micro, self.depths
        )


def propose_pipeline(case: Case, bar_s: float) -> Iterator[Candidate]:
    """Yield the pipelines that may be the fastest, replicated or not, and that over all GPUs."""
    if refuse_pipeline(case) or len(case.workers) < 2:
        return
    scored = _bound_teams(case)
    named = [one for one in scored if case.is_demanded(one[1])]
    found: list[Candidate] = []
    for some in (named, scored) if len(named) < len(scored) else (scored,):
        # Teams that cannot win are left out, but one is always shown.
        able = [one for one in some if one[0] <= bar_s]
        found += compute_best(case, able, lambda team: plan_pipeline(case, team), _MOST_CHAINS)
    if not any(one.fits for one in found):
        # The shortest chain that may fit shows the price of the mode.
        for workers in _chains(case):
            candidate = plan_pipeline(case, workers)
            if candidate is not None:
                found.append(candidate)
    yield from found
    # Layers are divided in every replica, so its time is bounded like that of one chain.
    if scored and min(bound_s for bound_s, _ in scored) <= bar_s:
        yield from _replicate(case)


def _replicate(case: Case) -> Iterator[Candidate]:
    """Yield the fastest plan of several pipelines over all GPUs, if there is one."""
    replicated: list[Candidate] = []
    for num in range(2, len(case.workers)):
        groups = divide_workers(case.workers, num)
        if not all(has_room(case, group) for group in groups):
            break
        several = plan_pipelines(case, groups)
        # Each replica has fewer GPUs as their number grows: stages soon exceed the memory for good,
        # while a plan that failed for lack of layers may still succeed.
        if several is not None and not several.fits:
            break
        if several is not None:
            replicated.append(several)
    if replicated:
        yield min(replicated, key=lambda one: one.step_s)


def _bound_teams(case: Case) -> list[tuple[float, tuple[Worker, ...]]]:
    """Return teams whose memory may be enough, each with a lower bound of a step, in seconds."""
    tokens, rows = case.mean_tokens, case.spec.batch_sequences
    layer_s = {
        worker.place: _micro_s(stage_pace(case, worker, 1, has_head=False), tokens, again=False)
        for worker in case.workers
    }
    heads_s = [
        _micro_s(stage_pace(case, worker, 0, has_head=True), tokens, again=False)
        for worker in case.workers
    ]
    most = len(list_trained_layers(case.shape, case.spec))
    found = []
    for team in list_teams(case, case.workers):
        if not 1 < len(team) <= most or not has_room(case, team):
            continue
        ideal_s = case.shape.num_layers / sum(1 / layer_s[worker.place] for worker in team)
        # A chain fills and drains: each stage adds its part to the time of the first micro-batch.
        found.append(((rows + len(team) - 1) * ideal_s + min(heads_s), team))
    return sorted(found, key=lambda one: (one[0], len(one[1]), [w.place for w in one[1]]))


def refuse_pipeline(case: Case) -> str:
    """Return why no pipeline trains this run; empty: a pipeline may."""
    if case.shape.shares_layers:
        return (
            f"Models of the family {case.shape.family} cannot be cut into stages: their layers "
            "share weights"
        )
    if not case.shape.may_be_cut:
        return (
            f"Models of the family {case.shape.family} cannot be cut into stages: their layers "
            "hand on more than features"
        )
    if refusal := case.spec.refuse_mode("pipeline"):
        return refusal
    if case.spec.shares is not None and case.spec.parallel == "auto":
        return "shares gives each GPU a part of every batch, and a stage computes every row"
    trained = list_trained_layers(case.shape, case.spec)
    if len(trained) > 1:
        return ""
    if case.shape.num_layers == 1:
        return "A model of one layer cannot be cut into stages"
    return (
        "Each stage of a pipeline needs an adapter, and adapter.targets gives one to layer "
        f"{trained[0] + 1} alone"
    )


def refuse_stages(case: Case, num_gpus: int) -> str:
    """Return why a pipeline over this number of GPUs is impossible; empty: it is possible."""
    num_trained = len(list_trained_layers(case.shape, case.spec))
    if num_trained >= num_gpus:
        return ""
    return (
        f"Each stage of a pipeline needs a layer with an adapter: {num_gpus} GPUs are more "
        f"than the {num_trained} layers that have one"
    )


def make_pipeline_stage(candidate: Candidate, gpu: GpuPlan, rank: int, num_layers: int) -> Stage:
    """Return the stage of a rank according to its GPU's plan."""
    first, stop = gpu.layers or (0, num_layers)
    return Stage(
        rank=rank,
        replica=gpu.replica,
        first_layer=first,
        stop_layer=stop,
        has_embedding=first == 0,
        has_head=stop == num_layers,
        max_in_flight=gpu.max_in_flight,
        num_recomputed=gpu.setting.num_recomputed,
        offloads=gpu.offloads,
    )


def say_missing_stages(smallest: Case) -> str:
    """Return what a pipeline over all GPUs lacks for the smallest form of a run, as a clause."""
    found = plan_pipeline(smallest, smallest.workers)
    if found is None:
        num = smallest.shape.num_layers
        return f"a pipeline has at most as many GPUs as the model has layers, {num}"
    needed = sum(gpu.memory.expected_bytes for gpu in found.gpus) / GIB
    room = sum(gpu.room_bytes for gpu in found.gpus) / GIB
    return f"its stages need {needed:.0f} GiB and the GPUs have {room:.0f}: it needs more of them"


def _chains(case: Case) -> Iterator[tuple[Worker, ...]]:
    yield case.team(case.workers)
    for workers in fastest_together(case):
        if 1 < len(workers) < len(case.workers) and has_room(case, workers, _ROOM_FACTOR):
            yield workers
            return


def has_room(case: Case, workers: Sequence[Worker], factor: float = 1.0) -> bool:
    """Return whether the GPUs' memory exceeds `factor` times that of the parts that stages divide.

    With a factor of 1, False means that no cut fits.
    """
    parts = case.fit(case.workers[0], 1).memory.parts
    need = sum(parts[part] for part in _SPLIT_PARTS)
    return sum(case.room_bytes(worker) for worker in workers) > factor * need


def divide_workers(workers: Sequence[Worker], num: int) -> list[tuple[Worker, ...]]:
    """Divide the GPUs into `num` groups of about equal speed, each in the order of the cluster."""
    speeds = [1 / worker.pace.token_s for worker in workers]
    groups: list[list[int]] = [[] for _ in range(num)]
    # Greedy: the fastest GPU first, always to the group that is slowest so far.
    for place in sorted(range(len(workers)), key=lambda i: (-speeds[i], i)):
        slowest = min(groups, key=lambda one: sum(speeds[i] for i in one))
        slowest.append(place)
    # By their first GPU, so that tiny differences in speed never change the order.
    return [tuple(workers[i] for i in sorted(group)) for group in sorted(groups, key=min)]


def plan_pipeline(case: Case, workers: tuple[Worker, ...]) -> Candidate | None:
    """Return the plan with one stage on each GPU; None: too few layers or GPUs."""
    return plan_pipelines(case, [workers]) if len(workers) > 1 else None


def plan_pipelines(case: Case, groups: Sequence[tuple[Worker, ...]]) -> Candidate | None:
    """Return the plan of one pipeline per group, data parallel; None: too few layers for one."""
    chains = []
    for group in groups:
        chain = plan_chain(case, group)
        if chain is None:
            return None
        chains.append(chain)
    return _assemble(case, chains)


def plan_chain(case: Case, workers: tuple[Worker, ...]) -> Chain | None:
    """Return the fastest chain over these GPUs that fits, else the one that needs the least memory.

    Micro-batches have one sequence each, since more micro-batches make the bubble smaller. None:
    fewer layers with an adapter than GPUs.
    """
    # A deep chain has more micro-batches in flight than 1F1B: a slow link then costs less time but
    # more memory.
    tried = [
        chain
        for order in _list_orders(case, workers)
        for holding in pipeline_memory.list_holdings(case)
        for is_deep in (True, False)
        if (chain := _plan_chain(case, order, holding=holding, is_deep=is_deep)) is not None
    ]
    if not tried:
        return None
    fitting = [chain for chain in tried if chain.fits]
    if not fitting:
        return tried[-1]
    return min(fitting, key=lambda one: one.time(case.spec.batch_sequences).total_s)


def _list_orders(case: Case, workers: tuple[Worker, ...]) -> list[tuple[Worker, ...]]:
    """Return the orders of the stages that may be the best, without duplicates.

    Early stages hold more micro-batches and the last one holds the head, so the order follows the
    memory or the speed; over unequal links it follows these, in either direction. GPUs of one PC
    stay neighbours.
    """
    nodes: dict[str, list[Worker]] = {}
    for worker in sorted(workers, key=lambda one: (one.pace.token_s, one.gpu.device)):
        nodes.setdefault(worker.node.name, []).append(worker)
    rooms = {name: max(case.room_bytes(worker) for worker in some) for name, some in nodes.items()}
    speeds = {name: sum(1 / worker.pace.token_s for worker in some) for name, some in nodes.items()}
    by_room = sorted(nodes, key=lambda name: (-rooms[name], -speeds[name], name))
    by_speed = sorted(nodes, key=lambda name: (-speeds[name], -rooms[name], name))
    orders = [by_room, by_room[::-1], by_speed, by_speed[::-1]]
    if len(nodes) <= _ALL_ORDERS:
        orders += map(list, permutations(sorted(nodes)))
    if not case.orders.is_uniform:
        path = list(case.orders.path(frozenset(nodes)))
        orders = [path, path[::-1], *orders]
    else:
        orders = [by_room, by_speed, *orders]
    if len(workers) > _FEW:
        orders = [order for order in orders if order in (by_room, *orders[:2])]
    found: dict[tuple[object, ...], tuple[Worker, ...]] = {}
    for order in orders:
        for forward in (1, -1) if len(workers) <= _FEW else (1,):
            some = tuple(worker for name in order for worker in nodes[name][::forward])
            hops = [case.ring(pair) for pair in pairwise(some)]
            found.setdefault((*(worker.like for worker in some), *hops), some)
    return list(found.values())


def _plan_chain(
    case: Case, workers: tuple[Worker, ...], *, holding: pipeline_memory.Holding, is_deep: bool
) -> Chain | None:
    num, num_layers, tokens = len(workers), case.shape.num_layers, case.mean_tokens
    paces = [stage_pace(case, worker, 1, has_head=False) for worker in workers]
    # A stage without layers takes only the time of the head.
    head_s = _micro_s(stage_pace(case, workers[-1], 0, has_head=True), tokens, again=False)
    layer_s = [_micro_s(pace, tokens, again=holding.again) for pace in paces]
    may_offload = [
        holding.offloads and pipeline_memory.can_offload(case, worker, seconds)
        for worker, seconds in zip(workers, layer_s, strict=True)
    ]
    if holding.offloads and not any(may_offload):
        return None
    holdings = [replace(holding, offloads=may) for may in may_offload]
    transfers = [_transfer_s(case, workers[i], workers[i + 1]) for i in range(num - 1)]
    depths = tuple(min(num - place, case.spec.batch_sequences) for place in range(num))
    if is_deep:
        # Memory, and so the cut, depends on the depths; choose these as if all stages were equal.
        even_s = num_layers / sum(1 / one for one in layer_s)
        depths = pipeline_schedule.choose_depths(
            [even_s] * num, transfers, case.spec.batch_sequences
        )
    found = _cut_layers(case, workers, layer_s, head_s, depths, holdings)
    if found is None:
        return None
    counts, fits = found
    stages_s = [count * one for count, one in zip(counts, layer_s, strict=True)]
    stages_s[-1] += head_s
    stages = _stages(case, workers, counts, stages_s, depths, holdings)
    return Chain(
        workers=workers,
        stages=stages,
        stages_s=tuple(stages_s),
        transfers_s=tuple(transfers),
        depths=depths,
        fits=fits and all(stage.fits for stage in stages),
    )


def _cut_layers(
    case: Case,
    workers: Sequence[Worker],
    layer_s: Sequence[float],
    head_s: float,
    depths: Sequence[int],
    holdings: Sequence[pipeline_memory.Holding],
) -> tuple[tuple[int, ...], bool] | None:
    """Return the number of layers of each stage, and whether they fit.

    None: too few layers have an adapter.
    """
    num, num_layers = len(workers), case.shape.num_layers
    trained = list_trained_layers(case.shape, case.spec)
    if len(trained) < num:
        return None

    def split(most: Sequence[int]) -> tuple[int, ...] | None:
        counts = pipeline_schedule.split_layers(num_layers, layer_s, most, (0.0, head_s))
        return counts and give_each_stage_one(counts, trained)

    def list_full(counts: Sequence[int]) -> list[int]:
        fits = (
            pipeline_memory.fit_stage(case, workers[i], counts, i, depths[i], holdings[i])[0]
            for i in range(num)
        )
        return [place for place, fit in enumerate(fits) if not fit.fits]

    most = [
        pipeline_memory.most_layers(
            case, worker, place, num, holding=holdings[place], in_flight=depths[place]
        )
        for place, worker in enumerate(workers)
    ]
    counts = split(most)
    # `most` assumes the model's first layers; with several kinds of layers it is only a guess.
    while len(case.shape.kinds) > 1 and counts is not None and (full := list_full(counts)):
        # A boundary that moved to include an adapter cannot move back, and searching further would
        # be too slow to follow typing.
        is_forced = any(counts[place] > most[place] for place in full)
        for place in full:
            most[place] = counts[place] - 1
        counts = None if is_forced else split(most)
    if counts is not None:
        return counts, True
    # Nothing fits: plan by speed alone, so that the plan can show how much memory is missing.
    by_speed = split([num_layers] * num)
    assert by_speed is not None  # there are as many layers as stages
    return by_speed, False


def _assemble(case: Case, chains: Sequence[Chain]) -> Candidate:
    total = case.spec.batch_sequences
    rows = split_rows(total, [1 / chain.time(total).total_s for chain in chains])
    times = [chain.time(max(1, count)) for chain, count in zip(chains, rows, strict=True)]
    slowest = max(range(len(chains)), key=lambda place: times[place].total_s)
    order = {worker.place: place for place, worker in enumerate(case.workers)}
    # GPUs in the order of the cluster, which is the order of the ranks.
    both = sorted(
        (
            (
                worker,
                replace(stage, share=stage.share * count / total, replica=replica),
                count * stage_s,
            )
            for replica, (chain, count) in enumerate(zip(chains, rows, strict=True))
            for worker, stage, stage_s in zip(
                chain.workers, chain.stages, chain.stages_s, strict=True
            )
        ),
        key=lambda one: order[one[0].place],
    )
    workers = tuple(worker for worker, _, _ in both)
    gpus = tuple(stage for _, stage, _ in both)
    shared_s = _share_gradients_s(case, chains, gpus)
    parts = StepParts(
        compute_s=times[slowest].compute_s,
        bubble_s=times[slowest].bubble_s,
        network_s=times[slowest].network_s + shared_s,
        optimizer_s=max(
            worker.pace.optimizer_s * _layer_share(case, gpu) for worker, gpu, _ in both
        ),
    )
    found = make_candidate(
        case,
        "pipeline",
        workers,
        gpus,
        parts,
        [busy_s for _, _, busy_s in both],
        fits=all(chain.fits for chain in chains),
    )
    # Features go forward while gradients come back, so each direction carries one of the two.
    busiest_s = max(
        max((0.0, *chain.transfers_s)) * count for chain, count in zip(chains, rows, strict=True)
    )
    return replace(found, wire_s=busiest_s + shared_s)


def _layer_share(case: Case, gpu: GpuPlan) -> float:
    first, stop = gpu.layers or (0, case.shape.num_layers)
    return (stop - first) / case.shape.num_layers


def _share_gradients_s(case: Case, chains: Sequence[Chain], gpus: Sequence[GpuPlan]) -> float:
    """Return the seconds in which replicas sum the gradients of their layers."""
    if len(chains) < 2:
        return 0.0
    workers = tuple(worker for chain in chains for worker in chain.workers)
    link, largest = case.ring(workers), max(_layer_share(case, gpu) for gpu in gpus)
    # Replicas exchange their gradients in full, whatever the run file compresses.
    plain = replace(case.spec, compression="none")
    num_bytes = gradient_bytes(case.shape, plain) * largest
    reduce_s = ring_s(num_bytes, link, len(chains)) * case.network_factor
    return reduce_s + statistics_s(link, len(workers))


def _stages(
    case: Case,
    workers: tuple[Worker, ...],
    counts: Sequence[int],
    stages_s: list[float],
    depths: Sequence[int],
    holdings: Sequence[pipeline_memory.Holding],
) -> tuple[GpuPlan, ...]:
    plans = []
    for place, (worker, layers) in enumerate(
        zip(workers, pipeline_schedule.bounds_of(counts), strict=True)
    ):
        fit, holding = pipeline_memory.fit_stage(
            case, worker, counts, place, depths[place], holdings[place]
        )
        num = counts[place]
        plan = gpu_plan(
            worker,
            fit,
            share=num / case.shape.num_layers,
            tokens_per_s=case.mean_tokens / stages_s[place],
            layers=layers,
        )
        plan = replace(plan, max_in_flight=depths[place])
        if holding.offloads:
            host_bytes = pipeline_memory.count_host_bytes(case, worker, num, depths[place])
            room = pipeline_memory.host_room_bytes(worker)
            plan = replace(
                plan,
                offloads=True,
                host_bytes=host_bytes,
                host_room_bytes=room,
                why_little_ram=worker.node.why_little_ram,
            )
        plans.append(plan)
    return tuple(plans)


def _transfer_s(case: Case, one: Worker, other: Worker) -> float:
    """Return the seconds that a micro-batch's features take from one stage to the next."""
    width = choose_width(case.spec, one.memory)
    link = case.ring((one, other))
    return case.mean_tokens * case.shape.hidden * width / link.bytes_per_s + link.latency_s / 2


def stage_pace(case: Case, worker: Worker, num_layers: int, *, has_head: bool) -> PlannedPace:
    """Return the time of passes over one stage."""
    part = num_layers / case.shape.num_layers
    work = case.work
    stage = ModelCost(
        layer_flops=work.layer_flops * part,
        layer_again_flops=work.layer_again_flops * part,
        lost_flops=work.lost_flops * part,
        lost_again_flops=work.lost_again_flops * part,
        attention_flops=work.attention_flops * part,
        attention_again_flops=work.attention_again_flops * part,
        head_flops=work.head_flops if has_head else 0.0,
        head_weight_bytes=work.head_weight_bytes if has_head else 0.0,
        logit_bytes=work.logit_bytes if has_head else 0.0,
        traffic_bytes=work.traffic_bytes * part,
        traffic_again_bytes=work.traffic_again_bytes * part,
        operand_bytes=work.operand_bytes * part,
        operand_again_bytes=work.operand_again_bytes * part,
        weight_bytes=work.weight_bytes * part,
        quantized_values=work.quantized_values * part,
        num_unpacked=work.num_unpacked,
        num_layers=num_layers,
        launch_s=work.launch_s * part,
        launch_again_s=work.launch_again_s * part,
        trained_values=work.trained_values,
        step_bytes=work.step_bytes * part,
    )
    share = arithmetic_share(case.spec, worker.gpu)
    return make_pace(stage, worker.rates, correction=worker.correction.speed.value, share=share)


def _micro_s(pace: PlannedPace, tokens: float, *, again: bool) -> float:
    computing_s, launching_s = tokens * pace.token_s + pace.pass_s, pace.launch_s
    if again:
        computing_s += tokens * pace.again_s + pace.again_pass_s
        launching_s += pace.launch_again_s
    # The host launches kernels while others run, so only the longer of the two counts.
    return max(computing_s, launching_s)
