"""`rackless chat`: ask a trained model, once or in a conversation."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import signal
import sys
from collections.abc import Iterator

from agents.contract.requests.chats import ChatAnswer, ChatMessage, ChatTurn
from app.cli.kit.command import with_core
from app.cli.kit.output import Output
from app.conversation import Subject, describe_answer
from app.core.action import CoreApi
from app.core.chats import AnswerPiece, AskModel, OpenChat, StopAnswer, UnloadModel
from app.errors import UsageError, UserError

_LEAVE = ("/quit", "/exit")
_NEW = "/new"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(handler=with_core(_chat))
    parser.add_argument(
        "what", metavar="ARTIFACT_OR_RUN", help="an artifact, the folder of an export, or a run"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="ask this one question; default: a conversation"
    )
    parser.add_argument(
        "--system", default="", metavar="TEXT", help="instructions before the first question"
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(256)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="0 always picks the likeliest token (default: 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample from the likeliest tokens with this total probability (default: 1)",
    )
    parser.add_argument(
        "--base", action="store_true", help="use the base model, as it was before the run"
    )
    parser.add_argument(
        "--checkpoint", type=int, metavar="STEP", help="default: the newest complete checkpoint"
    )
    parser.add_argument("--type", metavar="TYPE", help="which file of a gguf artifact")
    parser.add_argument("--node", metavar="NAME", help="default: a node that has it")


async def _chat(core: CoreApi, args: argparse.Namespace, out: Output) -> int:
    _check(args)
    subject = Subject(
        what=args.what,
        of_base=args.base,
        checkpoint=args.checkpoint,
        type=args.type,
        node=args.node,
    )
    loaded = await core.do(OpenChat(subject=subject), out.report)
    if loaded.opened.note:
        out.note(loaded.opened.note)
    try:
        if args.prompt is not None:
            out.document(await _ask(core, loaded.key, args, out, [], args.prompt))
        else:
            out.note(f"{loaded.title} on {loaded.node}. {_NEW} forgets what was said, /quit ends.")
            await _converse(core, loaded.key, args, out)
    finally:
        await core.do(UnloadModel(key=loaded.key))
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.prompt is not None and not args.prompt.strip():
        raise UsageError(
            "--prompt is empty", "Enter a question, or leave --prompt out to start a conversation."
        )
    check_limits(args.max_tokens, args.temperature, args.top_p)
    expect_text(args.system, "--system")
    expect_text(args.prompt or "", "--prompt")


def check_limits(max_tokens: int, temperature: float = 0.0, top_p: float = 1.0) -> None:
    """Check the generation settings.

    Raises:
        UsageError: one of them is out of its limits.
    """
    is_warm = temperature >= 0 and math.isfinite(temperature)
    if max_tokens < 1 or not is_warm or not 0 < top_p <= 1:
        raise UsageError(
            "these generation settings are not valid",
            "--max-tokens is at least 1, --temperature a number from 0 up, --top-p above 0 up to "
            "1.",
        )


def expect_text(text: str, what: str) -> None:
    """Check that a text can be sent to a node; terminal bytes that are not UTF-8 cannot.

    Raises:
        UsageError: it cannot.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not text in UTF-8", "Write it in UTF-8.") from None


async def _converse(core: CoreApi, key: int, args: argparse.Namespace, out: Output) -> None:
    """Read questions line by line until they end; Ctrl-C while it answers stops the answer."""
    said: list[ChatMessage] = []
    while True:
        # On a thread: the loop has to keep the connection to the node alive meanwhile.
        prompt = await asyncio.to_thread(_read_line, out)
        if prompt is None or prompt in _LEAVE:
            return
        if prompt == _NEW:
            said.clear()
        elif prompt:
            try:
                expect_text(prompt, "this line")
                out.line(await _ask(core, key, args, out, said, prompt))
            except UserError as error:
                # One failed question does not end the conversation.
                out.trouble(error, "rackless chat")


def _read_line(out: Output) -> str | None:
    if out.is_terminal and sys.stdin.isatty():
        out.raw(b"> ")
    line = sys.stdin.readline()
    return line.strip() if line else None


async def _ask(
    core: CoreApi,
    key: int,
    args: argparse.Namespace,
    out: Output,
    said: list[ChatMessage],
    prompt: str,
) -> ChatAnswer:
    """Ask, print the answer as it comes, and add both to the conversation."""

    def report(event: object) -> None:
        if isinstance(event, AnswerPiece):
            out.raw(event.text.encode("utf-8"))
        else:
            out.report(event)

    system = [ChatMessage(role="system", content=args.system)] if args.system else []
    asked = ChatMessage(role="user", content=prompt)
    turn = ChatTurn(
        messages=(*system, *said, asked),
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
    )
    with _stopping(core, key):
        found = await core.do(AskModel(key=key, turn=turn), report)
    # Only now: a question that failed must not be part of the next turn.
    said += [asked, ChatMessage(role="assistant", content=found.text)]
    out.text("")
    out.note(f"{describe_answer(found)}, in {found.runtime}")
    return found


@contextlib.contextmanager
def _stopping(core: CoreApi, key: int) -> Iterator[None]:
    """Let Ctrl-C stop the answer instead of the command."""
    loop = asyncio.get_running_loop()
    tasks = set[asyncio.Task[None]]()

    def stop() -> None:
        # Kept in a set, because the loop itself holds tasks only weakly.
        tasks.add(loop.create_task(core.do(StopAnswer(key=key))))

    with contextlib.suppress(NotImplementedError):  # Windows: there it ends the command
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        with contextlib.suppress(NotImplementedError):
            loop.remove_signal_handler(signal.SIGINT)
