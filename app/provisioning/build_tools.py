"""Make sure that a node has what builds an environment: uv, and a Python that the lock supports."""

from __future__ import annotations

import importlib.resources

from agents.contract.environments import EnvironmentTools, WheelQuery
from agents.contract.requests.environment import BringPython, FindBuildTools, UnpackUv
from agents.shared.packages.lock import read_lock_text
from app.errors import NodeUnreachable, UserError
from app.nodes.client import NodeClient
from app.progress import OnMessage, messages
from app.provisioning.wheels import WheelPlaces, bring_wheels


async def prepare_tools(
    client: NodeClient, places: WheelPlaces, say: OnMessage
) -> EnvironmentTools:
    """Return the tools of a node, after bringing what it lacks.

    Without uv, pip builds the environment, which is said.

    Raises:
        UserError: no Python of the node will do, and none can be brought.
    """
    tools = await client.ask(FindBuildTools())
    if tools.uv is None:
        tools = await _bring_uv(client, tools, places, say)
    if tools.python is None:
        tools = await client.ask(BringPython(), messages(say))
    return tools


async def _bring_uv(
    client: NodeClient, tools: EnvironmentTools, places: WheelPlaces, say: OnMessage
) -> EnvironmentTools:
    say(f"{client.name} has no uv: bringing it")
    file = importlib.resources.files("resources").joinpath("environments", "uv.lock")
    text = read_lock_text(file.read_text("utf-8")).text
    query = WheelQuery(lock_text=text, target=tools.target)
    try:
        await bring_wheels(client, query, places, say)
        return await client.ask(UnpackUv(query=query))
    except NodeUnreachable:
        raise
    except UserError as error:
        say(f"uv cannot be had ({error}); pip builds the environment, which takes longer")
        return tools
