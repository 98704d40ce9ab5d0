"""Describe results of actions, for the window and the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.progress import OnMessage
from app.text import count_of, show_bytes, show_bytes_of, show_duration, show_share

if TYPE_CHECKING:
    from app.artifact import ArtifactCopy, ArtifactSnapshot, Verdict
    from app.events import Certificate, NodeTransfer, SaveResult, TraceResult


def say_bytes(tell: OnMessage, what: str) -> Callable[[int, int], None]:
    """Return a byte counter that reports every two percent once.

    Args:
        tell: called with each line.
        what: description of the transfer, such as "sending the model to beta".
    """
    # -1, so that the first call reports 0 %.
    reported = -1

    def report(done: int, total: int) -> None:
        nonlocal reported
        share = 50 * done // max(total, 1)
        if share != reported:
            reported = share
            tell(f"{what}: {show_bytes_of(done, total)}")

    return report


def say_transfers(tell: OnMessage, what: str) -> Callable[[Sequence[NodeTransfer]], None]:
    """Return a callback for the progress of nodes that reports every two percent of the sum once.

    Args:
        tell: called with each line.
        what: description of the transfer, such as "sending the model".
    """
    reported = -1

    def report(nodes: Sequence[NodeTransfer]) -> None:
        nonlocal reported
        done = sum(node.held_bytes for node in nodes)
        share = 50 * done // max(sum(node.total_bytes for node in nodes), 1)
        if share != reported:
            reported = share
            tell(f"{what}: {', '.join(map(describe_transfer, nodes))}")

    return report


def describe_transfer(node: NodeTransfer) -> str:
    """Describe the progress of a node, with its rate and the remaining time.

    >>> from app.events import NodeTransfer
    >>> whole = 2_000_000_000
    >>> describe_transfer(NodeTransfer(
    ...     node="beta", held_bytes=whole // 4, total_bytes=whole, bytes_per_s=1e8))
    'beta 25 % at 95.4 MiB/s, 15 s left'
    >>> describe_transfer(NodeTransfer(
    ...     node="beta", held_bytes=whole, total_bytes=whole, bytes_per_s=None))
    'beta 100 %'
    """
    text = f"{node.node} {show_share(node.held_bytes / max(node.total_bytes, 1))}"
    if not node.bytes_per_s or node.held_bytes >= node.total_bytes:
        return text
    left = show_duration(node.remaining_s)
    return f"{text} at {show_bytes(node.bytes_per_s)}/s, {left} left"


def describe_saved(saved: SaveResult) -> str:
    """Describe the result of a request for a checkpoint.

    >>> from app.events import SaveResult
    >>> describe_saved(SaveResult(step=12, stall_s=0.031, seconds=1.5))
    'the checkpoint of step 12 is saved; training paused for 31 ms'
    """
    if saved.step is None:
        return "the checkpoint is saved after the current step and then listed in the run's events"
    if saved.seconds is None:
        return f"the checkpoint of step {saved.step} is being written"
    text = f"the checkpoint of step {saved.step} is saved"
    if saved.stall_s is None:
        return text
    return f"{text}; training paused for {show_duration(saved.stall_s)}"


def describe_trace(made: TraceResult) -> str:
    """Describe the result of a request for a trace."""
    if made.first_step is None:
        return "recording starts after the current step"
    whole = [trace for trace in made.ranks if not trace.problem]
    if not whole:
        return describe_no_trace(made)
    # All ranks record the same steps, since they agree on the request in one all-reduce.
    first, last = whole[0].first_step, whole[0].last_step
    steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
    size = show_bytes(sum(trace.size_bytes for trace in whole))
    text = f"{steps} recorded by {count_of(len(whole), 'rank')}: {size}"
    return text if made.is_complete else f"{text}; the rest arrives with the run's logs"


def describe_no_trace(made: TraceResult) -> str:
    """Explain why there is no trace."""
    if not made.ranks:
        return f"recording started at step {made.first_step}; it arrives with the run's logs"
    return f"no trace: {made.ranks[0].problem}"


def describe_certificate(found: Certificate) -> str:
    """Describe the result of a verified resume in a sentence.

    >>> from app.events import Certificate
    >>> describe_certificate(Certificate(promise="A", first_step=9, last_step=12, steps=4,
    ...     equal_to_the_bit=True, largest_difference=0.0, other_samples=0, kept=True))
    'steps 9 to 12 replayed: samples and losses bit-exact'
    """
    one = found.first_step == found.last_step
    which = f"step {found.first_step}" if one else f"steps {found.first_step} to {found.last_step}"
    difference = f"largest relative difference of a loss {found.largest_difference:.1e}"
    if found.other_samples:
        return (
            f"{which} replayed: MISMATCH: {count_of(found.other_samples, 'step')} saw different "
            f"samples than logged ({difference}); do not trust the result of this run"
        )
    if found.equal_to_the_bit:
        return f"{which} replayed: samples and losses bit-exact"
    if found.kept:
        return (
            f"{which} replayed: same samples, {difference}, as expected on different devices, "
            "ranks or versions"
        )
    promised = "identical losses" if found.promise == "A" else "a difference within rounding"
    return f"{which} replayed: MISMATCH: same samples, but {difference}; expected: {promised}"


def describe_verdict(verdict: Verdict) -> str:
    """Describe the measured quality of one file of an artifact.

    >>> from app.artifact import Verdict
    >>> describe_verdict(Verdict(name="Q8_0", keep=True, problems=(), kl=0.00017, control_kl=0.017,
    ...     perplexity=3.965, original_perplexity=3.976, size_bytes=1909216, tokens_per_s=628.0))
    'Q8_0: keep; KL 0.00017 (plain rounding 0.017), perplexity 3.965 (original 3.976), 1.8 MiB'
    """
    figures = f"KL {verdict.kl:.2g} (plain rounding {verdict.control_kl:.2g})"
    figures += f", perplexity {verdict.perplexity:.4g} (original {verdict.original_perplexity:.4g})"
    figures += f", {show_bytes(verdict.size_bytes)}"
    figures += ", speed not measured" if verdict.tokens_per_s is None else ""
    if verdict.keep:
        return f"{verdict.name}: keep; {figures}"
    return f"{verdict.name}: do not keep. {' '.join(verdict.problems)} {figures}"


def describe_lineage(artifact: ArtifactSnapshot) -> list[tuple[str, str]]:
    """Return (caption, text) of each origin of an artifact, beginning with the base model."""
    origin = artifact.origin
    if origin is None:
        return [("origin", "unknown: made elsewhere")]
    return [
        ("base", _with_hash(origin.base, origin.base_sha256)),
        ("licence", origin.licence or "unknown"),
        ("data", _with_hash(origin.data, origin.data_sha256)),
        ("run", f"{origin.run_name} ({origin.run_id}), step {origin.step}"),
        ("checkpoint", artifact.checkpoint or ""),
        *_describe_making(artifact.measured or {}),
    ]


def _describe_making(measured: dict[str, Any]) -> list[tuple[str, str]]:
    phases = measured.get("phases") or []
    if not phases:
        return []
    seconds = sum(phase["seconds"] for phase in phases)
    parts = [f"{show_duration(seconds)} on {measured.get('node') or 'a node'}"]
    parts.append(f"up to {show_bytes(max(phase['ram_bytes'] for phase in phases))} of memory")
    # Phases that use no GPU report no GPU memory.
    on_gpu = [phase["vram_bytes"] for phase in phases if phase.get("vram_bytes") is not None]
    parts += [f"{show_bytes(max(on_gpu))} of GPU memory"] if on_gpu else []
    return [("made in", ", ".join(parts))]


def _with_hash(name: str, sha256: str | None) -> str:
    return f"{name} (sha256 {sha256[:16]})" if sha256 else name


def describe_copy(copy: ArtifactCopy) -> str:
    """Describe the location and state of a copy.

    >>> from app.artifact import ArtifactCopy
    >>> describe_copy(ArtifactCopy(kind="node", place="beta", path="artifacts/a-1", made_s=0.0))
    'node beta, artifacts/a-1: whole when made'
    """
    places = {"folder": copy.place, "node": f"node {copy.place}", "hub": f"hub {copy.place}"}
    where = places[copy.kind] + (f", {copy.path}" if copy.path else "")
    states = {
        "whole": "whole",
        "missing": "MISSING",
        "damaged": "DAMAGED",
        "unknown": "not checked",
    }
    state = states[copy.state]
    if copy.state == "whole" and copy.checked_s is None:
        state += " when made"  # its files were not hashed since
    return f"{where}: {state}" + (f", {copy.problem}" if copy.problem else "")
