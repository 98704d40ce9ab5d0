"""Set up the training environment of a node: adopt or build one that fits the lock file.

The node does the work (agents/node/environment.py): it lists the packages of an interpreter, or
builds a virtual environment from the lock, in which every file has a hash. Nodes are compatible if
they fit the same versions, identified by a hash over names and versions, which is the same for all
builds of torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agents.contract.environments import WheelQuery
from agents.contract.node import EnvironmentReport, NodeFacts
from agents.contract.requests.environment import EnvironmentBuild, EnvironmentQuery, TryEnvironment
from agents.contract.requests.node import ReadFacts
from app.errors import NodeUnreachable, UserError, describe_error
from app.nodes.client import NodeClient
from app.program import own_pythons
from app.progress import OnMessage, messages
from app.provisioning.torch_build import (
    BESIDE_TORCH,
    DRIVERS,
    TorchBuild,
    choose_torch,
    is_of_other_build,
    serves,
    shipped_text,
)

if TYPE_CHECKING:
    from app.provisioning.wheels import WheelPlaces

# Maximum number of differing packages that a message lists.
_SHOWN_PACKAGES = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentLock:
    text: str
    """Text for pip, without comments and with a hash for every file."""
    requirements: dict[str, str]
    """Exact version by name of the distribution, of packages that are installed on every system."""
    sha256: str
    """Hash over the sorted requirements."""


def read_train_lock(torch: TorchBuild | None = None, made: str | None = None) -> EnvironmentLock:
    """Return the lock of this version of Rackless for training, with one build of torch.

    Args:
        torch: build of torch; None for the one for current drivers. It changes only the text.
        made: lock of that build, if it does not ship.
    """
    build = made or shipped_text((torch or TorchBuild.CUDA_13).lock)
    # The build comes first, so that one which the index lacks fails before other downloads. `pip`
    # is included for packages of exports; environments are not compared by it.
    text = build + "".join(map(shipped_text, BESIDE_TORCH))
    train = parse_lock(shipped_text("train")).requirements
    # The libraries of the build, such as CUDA's, differ by build and are not compared.
    version = parse_lock(build).requirements["torch"].partition("+")[0]
    return _lock(text, {**train, "torch": version})


def read_lock(name: str) -> EnvironmentLock:
    """Return a lock that ships with Rackless: `train`, or extra packages of an export format."""
    return read_train_lock() if name == "train" else parse_lock(shipped_text(name))


def parse_lock(text: str) -> EnvironmentLock:
    """Parse lines of `name==version --hash=sha256:...`; `#` begins a comment.

    Raises:
        ValueError: a line has another form, a package has no hash, or a name is repeated.
    """
    from agents.shared.packages.lock import (
        read_lock_text,  # late, here and below: most commands need no lock
    )

    packages = read_lock_text(text).packages
    return _lock(text, {one.name: one.version for one in packages if not one.marker})


def _lock(text: str, requirements: dict[str, str]) -> EnvironmentLock:
    from agents.shared.packages.lock import read_lock_text

    # Sorted, so that only other packages or versions change the hash.
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(requirements.items()))
    return EnvironmentLock(
        text=read_lock_text(text).text,
        requirements=requirements,
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
    )


async def setup_environment(
    client: NodeClient,
    places: WheelPlaces,
    python: str | None = None,
    progress: OnMessage | None = None,
    *,
    lock: EnvironmentLock | None = None,
    candidates: Sequence[str] = own_pythons(),
    others: Sequence[NodeFacts] = (),
    accept_index: bool = False,
) -> EnvironmentReport:
    """Make sure that a node has an environment that fits the lock, and let the node store it.

    A new build is tested: imports, and one tiny training step on each device.

    Args:
        client: client of the node.
        places: sources of packages.
        python: interpreter to adopt; None for the stored one, else the first of `candidates` that
            fits, else a newly built one.
        progress: callback with sentences.
        lock: packages to fit; None for those of this version's trainer.
        candidates: interpreters to try before downloading gigabytes. The master's own exists
            on the node if the node is this PC.
        others: facts of the other nodes, which should get the same build of torch.
        accept_index: True if the user accepts hashes from PyTorch's index, for builds whose lock
            Rackless does not ship.

    Raises:
        UnshippedLock: the node needs such a build, and the user has not accepted; nothing changes.
        UserError: `python` does not fit (with the differences), the build failed (with why), or
            training does not work with what was built.
    """
    from app.provisioning.torch_locks import NoTorchLock  # late: most commands build nothing

    say = progress or _say_nothing
    trouble: UserError | None = None
    try:
        report = await _find_or_build(
            client, places, python, say, lock, candidates, others, accept_index
        )
    except NoTorchLock as error:
        trouble = error
        say(f"{describe_error(error)} Until then, the build for current drivers has to do")
        report = await _find_or_build(client, places, None, say, read_train_lock(), (), (), False)
    # The user trained with an adopted one before; a test's stand-in lock has no torch to try.
    if report.built_with is None or (lock and "torch" not in lock.requirements):
        return report
    if report.trial is None or report.trial.failed:
        say("trying it: imports, and one tiny training step on each device")
        report = await client.ask(TryEnvironment(), messages(progress))
    failed = report.trial.failed if report.trial else ()
    if failed and trouble is not None:
        raise trouble
    if failed:
        raise UserError(
            f"the environment of {client.name} is built, but {failed[0].name} cannot train with "
            f"it: {failed[0].problem}",
            f"Run rackless check {client.name}, which checks driver and card",
            where=client.name,
        )
    return report


def _say_nothing(text: str) -> None:
    del text


async def _find_or_build(
    client: NodeClient,
    places: WheelPlaces,
    python: str | None,
    say: OnMessage,
    given: EnvironmentLock | None,
    candidates: Sequence[str],
    others: Sequence[NodeFacts],
    accept_index: bool,
) -> EnvironmentReport:
    from app.provisioning.torch_locks import has_lock, provide_lock

    lock = given or read_train_lock()
    if python is not None:
        report = await client.ask(_adopting(lock, python))
        if not report.fits:
            raise misfit(client.name, report)
        return report
    report = await find_environment(client, lock)
    facts = await client.ask(ReadFacts())
    # Without the user's consent, a node that itself needs no such build gets none for the others.
    is_agreed = accept_index or has_lock(TorchBuild.CUDA_12, places.locks)
    torch = None if given else choose_torch(facts, others if is_agreed else ())
    if await _keeps(client, report, torch, say):
        return report
    # Adopting an interpreter takes seconds, building an environment downloads gigabytes. The
    # master's own interpreter has the build for current drivers.
    may_adopt = not report.fits and torch is not TorchBuild.CUDA_12
    for candidate in candidates if may_adopt else ():
        report = await _find(client, _adopting(lock, candidate))
        if report.fits:
            return report
    if torch is None:
        return await _build(client, places, lock, lock, None, say)
    _name_unserved(facts, say)
    made = await provide_lock(torch, client.name, places, accept_index=accept_index, say=say)
    return await _build(client, places, lock, read_train_lock(torch, made), torch, say)


async def _keeps(
    client: NodeClient, report: EnvironmentReport, torch: TorchBuild | None, say: OnMessage
) -> bool:
    """Return True if a node keeps its environment."""
    # Our own builds are replaced for other GPUs, such as after a card was added or the driver
    # changed. An adopted interpreter is kept, unless its GPUs need an older build of torch and
    # cannot train with it.
    if not report.fits or torch is None:
        return report.fits
    if report.built_with is not None:
        return not is_of_other_build(report.trial, torch)
    if torch is not TorchBuild.CUDA_12:
        return True
    say(f"trying {report.python}, since an older build of torch is needed here")
    trial = report.trial or (await client.ask(TryEnvironment(), messages(say))).trial
    return trial is None or not trial.failed


def _name_unserved(facts: NodeFacts, say: OnMessage) -> None:
    for gpu in facts.gpus:
        if not any(serves(build, gpu) for build in DRIVERS):
            say(
                f"no build of torch serves {gpu.name} with driver {gpu.driver or 'not known'}: "
                "rackless check lists the updates"
            )


async def _build(
    client: NodeClient,
    places: WheelPlaces,
    lock: EnvironmentLock,
    first: EnvironmentLock,
    torch: TorchBuild | None,
    say: OnMessage,
) -> EnvironmentReport:
    """Build `first`, which is `lock` with one build of torch; without a GPU, `lock` is enough."""
    # Late: most commands build nothing.
    from app.provisioning.build_tools import prepare_tools
    from app.provisioning.wheels import NoWheels, bring_wheels

    tools = await prepare_tools(client, places, say)
    index_url = None if torch is None else torch.index_url
    query = WheelQuery(lock_text=first.text, target=tools.target, index_url=index_url)
    try:
        await bring_wheels(client, query, places, say)
    except NoWheels as missing:
        if torch is not TorchBuild.CPU:
            raise
        # PyPI's build has CUDA, and also works without a GPU.
        say(f"{missing.message}. Taking the build of PyPI instead, which is larger")
        query = replace(query, lock_text=lock.text, index_url=None)
        await bring_wheels(client, query, places, say)
    order = EnvironmentBuild(
        lock_sha256=lock.sha256,
        lock_text=query.lock_text,
        requirements=lock.requirements,
        target=tools.target,
        python=tools.python or "",
    )
    return await client.ask(order, messages(say))


async def find_environment(client: NodeClient, lock: EnvironmentLock) -> EnvironmentReport:
    """Compare the stored environment of the node with `lock`."""
    query = EnvironmentQuery(lock_sha256=lock.sha256, requirements=lock.requirements)
    return await _find(client, query)


def misfit(name: str, report: EnvironmentReport) -> UserError:
    """Return the error for an interpreter that does not fit the lock."""
    parts = [*report.different, *(f"{package} is missing" for package in report.missing)]
    shown = "; ".join(parts[:_SHOWN_PACKAGES])
    more = len(parts) - _SHOWN_PACKAGES
    return UserError(
        f"{report.python or 'The environment'} on {name} is not what training needs: {shown}"
        + (f"; and {more} more" if more > 0 else ""),
        f"Let an environment be built there instead: rackless nodes setup {name}",
    )


def _adopting(lock: EnvironmentLock, python: str) -> EnvironmentQuery:
    return EnvironmentQuery(
        lock_sha256=lock.sha256, requirements=lock.requirements, python=python, adopt=True
    )


async def _find(client: NodeClient, query: EnvironmentQuery) -> EnvironmentReport:
    """Query an environment; an interpreter that is missing or broken counts as not fitting."""
    try:
        return await client.ask(query)
    # NodeUnreachable is also a UserError, but says nothing about the interpreter.
    except NodeUnreachable:
        raise
    except UserError:
        return EnvironmentReport(python=query.python, missing=tuple(sorted(query.requirements)))


def python_of(node: str, facts: NodeFacts) -> str:
    """Return the interpreter of a node's training environment.

    Raises:
        UserError: there is no environment, or it does not fit the lock.
    """
    report = facts.environment
    hint = f"Build it with: rackless nodes setup {node}"
    if report is None or report.python is None:
        raise UserError(f"node {node} has no training environment", hint, topic="environment")
    if not report.fits:
        wrong = [f"{name} is missing" for name in report.missing[:3]] + list(report.different[:3])
        detail = f": {'; '.join(wrong)}" if wrong else ""
        raise UserError(
            f"the training environment of node {node} does not fit{detail}",
            hint,
            topic="environment",
        )
    return report.python
