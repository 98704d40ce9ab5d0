"""Give tool calls to a chat template in the form that it takes, and find those that it leaves out.

Most templates take arguments as an object; some concatenate them as a text. Mistral's want ids of
nine characters. So the forms are tried on the conversation, until one shows every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agents.trainer.data.conversations import ConversationTurn
from agents.trainer.data.turns.tool_calls import ToolCall, ToolError

Turns = tuple[ConversationTurn, ...]
Render = Callable[[Turns], str]
NO_TOOLS = "no_tools"
"""Kind of the finding about tools for which the template has no place."""
_ID = "tool_call_id"
_ARGUMENT = "argument-of-call"


def settle_calls(turns: Turns, render: Render) -> Turns:
    """Return the turns with their calls in the form that the chat template takes.

    Args:
        turns: the turns.
        render: writes turns with the chat template.

    Raises:
        ValueError: the template rejects every form.
    """
    if not any(turn.calls for turn in turns):
        return turns
    rendered, error = None, ValueError("")
    numbered = _number(turns)
    for form in (turns, _as_text(turns), numbered, _as_text(numbered)):
        try:
            render(form)
            num_hidden, is_python = _probe(form, render)
        except ValueError as refused:
            error = refused
            continue
        if not num_hidden and not is_python:
            return form
        rendered = rendered or form
    if rendered is None:
        raise error
    return rendered


def find_left_out(turns: Turns, text: str, render: Render) -> set[tuple[str, str]]:
    """Return kind and column of each finding about what the template leaves out.

    Args:
        turns: the settled turns.
        text: their text.
        render: writes turns with the chat template.

    Raises:
        ToolError: it shows some calls of the conversation and leaves out others.
    """
    found = set()
    if turns and turns[0].tools:
        try:
            if render(tuple(replace(turn, tools="") for turn in turns)) == text:
                found.add((NO_TOOLS, "tools"))
        except ValueError:
            pass  # the template needs them
    if any(turn.calls for turn in turns):
        hidden, _ = _probe(turns, render)
        if hidden == sum(len(turn.calls) for turn in turns):
            found.add((NO_TOOLS, "messages[].tool_calls"))
        elif hidden:
            raise ToolError("the chat template of this model leaves out some of its tool calls")
        if any(turn.calls and turn.content.strip() not in text for turn in turns):
            found.add(("template", "messages[].content"))
    return found


def shows_calls(render: Render) -> bool:
    """Return whether the template shows the call of a tool."""
    asked = ConversationTurn(role="user", content="a")
    call = ToolCall(name="tool-that-is-called", arguments={"b": "c"})
    called = (asked, ConversationTurn(role="assistant", content="", calls=(call,)))
    try:
        return call.name in render(settle_calls(called, render))
    except ValueError:
        return False


def _probe(turns: Turns, render: Render) -> tuple[int, bool]:
    """Return how many calls a template leaves out, and whether it writes arguments as Python does.

    Each call has a name of its own for it, since tools and results name the tools, too.
    """
    probed: list[ConversationTurn] = []
    names: list[str] = []
    for turn in turns:
        calls = []
        for call in turn.calls:
            names.append(f"tool-of-call-{len(names)}-")
            is_text = isinstance(call.arguments, str)
            other = replace(call, name=names[-1], arguments={_ARGUMENT: ""})
            calls.append(other.as_text if is_text else other)
        probed.append(replace(turn, calls=tuple(calls)))
    text = render(tuple(probed))
    return sum(name not in text for name in names), f"'{_ARGUMENT}'" in text


def _as_text(turns: Turns) -> Turns:
    return tuple(replace(turn, calls=tuple(call.as_text for call in turn.calls)) for turn in turns)


def _number(turns: Turns) -> Turns:
    """Return the turns with ids of nine characters, and with the tool's name at each result."""
    calls = [call for turn in turns for call in turn.calls]
    ids = [f"call{number:05d}" for number in range(1, len(calls) + 1)]
    known = {call.id: place for place, call in enumerate(calls) if call.id}
    numbered, num_calls, num_results = [], 0, 0
    for turn in turns:
        last = num_calls + len(turn.calls)
        own = zip(turn.calls, ids[num_calls:last], strict=True)
        turn = replace(turn, calls=tuple(replace(call, id=new) for call, new in own))
        num_calls = last
        if turn.role == "tool" and num_calls:
            extra = dict(turn.extra)
            # Results without an id stand in the order of their calls.
            place = known.get(extra.get(_ID, ""), min(num_results, num_calls - 1))
            extra = {"name": calls[place].name, **extra, _ID: ids[place]}
            turn, num_results = replace(turn, extra=tuple(extra.items())), num_results + 1
        numbered.append(turn)
    return tuple(numbered)
