"""Provide a node with the tools that build an environment: uv, and a Python that the lock
supports.
"""

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
    """Return the build tools of a node, after installing the missing ones.

    Without uv, pip builds the environment, and `say` gets a sentence about it.

    Raises:
        UserError: the node has no suitable Python, and none can be installed.
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
    say(f"{client.name} has no uv: installing it")
    file = importlib.resources.files("resources").joinpath("environments", "uv.lock")
    text = read_lock_text(file.read_text("utf-8")).text
    query = WheelQuery(lock_text=text, target=tools.target)
    try:
        await bring_wheels(client, query, places, say)
        return await client.ask(UnpackUv(query=query))
    except NodeUnreachable:
        raise
    except UserError as error:
        # Not fatal: pip builds the same environment, only slower.
        say(f"uv cannot be installed ({error}); pip builds the environment, which takes longer")
        return tools
