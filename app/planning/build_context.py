"""Prepare a request for planning: sequence lengths, steps, GPUs and the assumptions made."""

from __future__ import annotations

import math
from dataclasses import replace

from agents.contract.objectives import OBJECTIVES
from agents.contract.spec import RunSpec
from app.planning import throughput
from app.planning.candidate import PlanRequest
from app.planning.hardware.cluster import Cluster, PlannedGpu, PlannedNode
from app.planning.hardware.rates import find_rates
from app.planning.memory.forecast import GIB
from app.planning.memory.gpu import GpuMemory, is_compiled
from app.planning.plan_context import Case, Worker
from app.planning.row_lengths import RowLengths, assume_lengths

# Share of a packed sequence that holds tokens; the rest stays empty.
_PACKED_SHARE = 0.97


def open_case(request: PlanRequest) -> Case:
    """Compute what all parallel modes have in common."""
    spec = request.spec
    shape = request.shape.tell_apart(spec.adapter.targets)
    cluster = request.cluster
    cluster = choose_cluster(spec, cluster)
    longest, mean, notes = _lengths(request)
    work = throughput.measure_work(shape, spec, _attended(request, mean))
    workers, more = _workers(request, cluster, work)
    more += [
        f"{node.name}: its RAM is not known, so none of it is used for offloading or streaming"
        for node in cluster.nodes
        if node.gpus and node.ram_bytes is None
    ]
    kept = {node.name for node in cluster.nodes}
    more += [
        f"{node.name} has no GPU and takes no part"
        for node in request.cluster.nodes
        if node.name not in kept and spec.nodes == "all"
    ]
    return Case(
        spec=spec,
        shape=shape,
        cluster=cluster,
        workers=workers,
        work=work,
        rows=_rows(request, mean, longest),
        longest_tokens=longest,
        num_steps=count_steps(request, mean),
        has_estimated_steps=request.data.is_estimated and spec.max_steps is None,
        network_factor=request.learned.network.value,
        assumptions=(*notes, *more, *_link_notes(cluster)),
    )


def choose_cluster(spec: RunSpec, cluster: Cluster) -> Cluster:
    """Return the PCs and GPUs among which a plan may choose.

    Listed ones keep the order of the list, whose first PC has rank 0. With `all` the order is that
    of names, so that the order of a file decides nothing, and a PC without a GPU takes no part if
    others have one: its CPU would be a hundred times slower.
    """
    if spec.nodes != "all":
        return cluster.keep(spec.nodes)
    if all(is_cpu_only(node) for node in cluster.nodes) or spec.shares is not None:
        return cluster
    able = [node for node in cluster.nodes if not is_cpu_only(node)]
    return replace(cluster, nodes=tuple(sorted(able, key=lambda node: node.name)))


def is_cpu_only(node: PlannedNode) -> bool:
    """Return whether a PC would train on its CPU."""
    return bool(node.gpus) and all(gpu.device == "cpu" for gpu in node.gpus)


def _lengths(request: PlanRequest) -> tuple[int, float, list[str]]:
    """Return the longest and the mean length of a sequence in tokens, and the assumptions made."""
    spec, data = request.spec, request.data
    limit = spec.sequence_tokens * OBJECTIVES[spec.objective].num_segments
    if spec.packing:
        return limit, limit * _PACKED_SHARE, []
    notes = []
    if data.mean_tokens is None:
        notes.append(f"every row is assumed to have {limit} tokens: the data was not counted")
    longest = min(limit, data.longest_tokens or limit)
    return longest, min(float(longest), data.mean_tokens or float(limit)), notes


def _rows(request: PlanRequest, mean_tokens: float, longest_tokens: int) -> RowLengths:
    """Return the distribution of sequence lengths: as counted, else assumed."""
    lengths = request.data.lengths
    if request.spec.packing or not lengths or lengths[0] == lengths[-1]:
        return assume_lengths(mean_tokens, longest_tokens)
    return RowLengths(mean_tokens=mean_tokens, lengths=lengths)


def _attended(request: PlanRequest, mean_tokens: float) -> float:
    """Return the mean length that attention spans, in tokens."""
    if request.spec.packing:
        # Attention does not cross rows of a packed sequence.
        return min(mean_tokens, request.data.mean_tokens or mean_tokens)
    # The two answers of a preference pair are rows of their own.
    return mean_tokens / OBJECTIVES[request.spec.objective].num_segments


def count_steps(request: PlanRequest, mean_tokens: float) -> int | None:
    """Return the number of optimizer steps; None: the number of rows is not known."""
    spec, data = request.spec, request.data
    if spec.max_steps is not None:
        return spec.max_steps
    if data.num_rows is None:
        return None
    sequences = float(data.num_rows)
    if spec.packing:
        # A packed sequence holds several rows.
        sequences *= (data.mean_tokens or mean_tokens) / mean_tokens
    return max(1, math.ceil(max(1.0, sequences) * spec.epochs / spec.batch_sequences))


def _workers(
    request: PlanRequest, cluster: Cluster, work: throughput.ModelCost
) -> tuple[tuple[Worker, ...], list[str]]:
    workers, notes = [], []
    for node in cluster.nodes:
        if not node.gpus:
            notes.append(f"{node.name} has no GPU and takes no part")
        for gpu in node.gpus:
            memory = gpu.memory
            if memory is None:
                notes.append(f"{node.name}: the memory of its {gpu.name} is not known")
                continue
            workers.append(make_worker(request, node, gpu, memory, work))
    return tuple(workers), [*dict.fromkeys(notes), *_rate_notes(workers)]


def make_worker(
    request: PlanRequest,
    node: PlannedNode,
    gpu: PlannedGpu,
    memory: GpuMemory,
    work: throughput.ModelCost,
) -> Worker:
    """Return a GPU with its rates and corrections for a run.

    Args:
        request: the run.
        node: PC of the GPU.
        gpu: the card.
        memory: its memory.
        work: cost of the model.
    """
    spec, rates = request.spec, find_rates(gpu)
    learned = request.learned.find(
        gpu.name, request.shape.family, spec.adapter.kind, is_calibrated=gpu.calibration is not None
    )
    is_cpu = gpu.device == "cpu"
    # `memory_gib` limits GPUs only; the trainer cannot cap the RAM of a CPU rank.
    limit_gib = None if is_cpu else spec.memory_gib
    # torch has no expandable segments on Windows, nor under WSL2.
    memory = replace(
        memory,
        cap_bytes=None if limit_gib is None else int(limit_gib * GIB),
        pieces_grow=node.system not in ("wsl", "windows"),
        has_compiler=node.has_compiler,
    )
    return Worker(
        node=node,
        gpu=gpu,
        memory=memory,
        rates=rates,
        pace=throughput.make_pace(
            work,
            rates,
            correction=learned.speed.value,
            # The learned factor distinguishes only card, family and adapter, not the arithmetic.
            share=throughput.arithmetic_share(spec, gpu),
            may_replay=not is_cpu and throughput.can_replay(spec, memory),
            compiled=is_cpu or is_compiled(spec, memory),
        ),
        correction=learned,
        num_sharing=max(1, len(node.gpus)),
    )


def _rate_notes(workers: list[Worker]) -> list[str]:
    """Return the basis of the speeds, one sentence per kind of card."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for worker in workers:
        words = _rate_words(worker)
        names = nodes.setdefault((worker.gpu.name, words), [])
        if words and worker.node.name not in names:
            names.append(worker.node.name)
    return [
        f"{', '.join(names)}: the speed of {card} {words}"
        for (card, words), names in nodes.items()
        if words
    ]


def _rate_words(worker: Worker) -> str:
    rates, learned, measured_on = worker.rates, worker.correction, worker.gpu.measured_on
    if learned.speed.num_runs:
        return f"follows {learned.speed.reason}"
    if rates.source == "measured":
        return f"is that measured on {measured_on}" if measured_on else ""
    if rates.source == "given":
        return "is the one you gave, not measured"
    if rates.source == "similar" and worker.gpu.similar is not None:
        slowest = worker.gpu.similar.name
        return (
            "is a guess until it is measured: the card is not listed, so the slowest figures of "
            f"its class count, those of {slowest}"
        )
    if rates.source == "assumed":
        return "is a guess until it is measured: the card is not listed"
    return "is taken from its data sheet, not measured"


def _link_notes(cluster: Cluster) -> list[str]:
    names = [node.name for node in cluster.nodes]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    assumed = [pair for pair in pairs if cluster.link(*pair).source == "assumed"]
    if not assumed:
        return []
    where = " and ".join(assumed[0]) if len(assumed) == 1 else f"{len(assumed)} pairs of nodes"
    return [f"the network between {where} is assumed to be Gigabit Ethernet: it was not measured"]
