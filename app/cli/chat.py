"""`rackless chat`: ask a trained model."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from app.cli.command import Commands, add_command, with_core
from app.cli.output import Output
from app.errors import UsageError
from app.text import show_duration

if TYPE_CHECKING:
    from app.core import Core


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "chat", "ask a trained model a question", with_core(_chat))
    parser.add_argument("what", metavar="ARTIFACT_OR_RUN", help="a folder of an export, or a run")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--system", default="", metavar="TEXT", help="said before the question")
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="(256)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: always the likeliest word (0)"
    )
    parser.add_argument(
        "--base", action="store_true", help="ask the model as it was before the run"
    )
    parser.add_argument("--type", metavar="TYPE", help="which file of a gguf artifact")
    parser.add_argument("--node", metavar="NAME", help="none: one that has it")


async def _chat(core: Core, args: argparse.Namespace, out: Output) -> int:
    from app.runs.chat import Question

    if args.max_tokens < 1 or args.temperature < 0 or not args.prompt.strip():
        raise UsageError(
            "that cannot be asked",
            "--prompt needs text, --max-tokens at least 1, --temperature at least 0.",
        )
    question = Question(
        prompt=args.prompt,
        system=args.system,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        of_base=args.base,
        type=args.type,
        node=args.node,
    )
    found = await core.chat(
        args.what,
        question,
        progress=out.note,
        piece=lambda text: out.raw(text.encode("utf-8")),
    )
    out.document(found)
    out.text("")
    speed = f", {found.tokens_per_s:.1f} tokens/s" if found.tokens_per_s is not None else ""
    ended = "; it was cut there" if found.cut else ""
    out.note(
        f"{found.num_tokens} tokens{ended}, first after {show_duration(found.first_token_s)}"
        f"{speed}, in {found.runtime}"
    )
    return 0
