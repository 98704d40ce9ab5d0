"""The card of a merged model: where it comes from. Nothing is measured, since nothing is lost."""

from __future__ import annotations

import re

from agents.contract.requests.exports import Origin

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def describe_merged(origin: Origin) -> str:
    """Return the card as Markdown.

    >>> origin = Origin(base="org/base", data="x.jsonl", run_id="r", run_name="poems", step=4)
    >>> describe_merged(origin).splitlines()[1]
    'base_model: org/base'
    """
    base = f"base_model: {origin.base}\n" if _HUB_ID.fullmatch(origin.base) else ""
    licence = f"license: {origin.licence}\n" if origin.licence else ""
    return (
        f"---\n{base}{licence}tags: [rackless, merged]\n---\n"
        f"# {origin.run_name}, merged\n\n"
        f"Step {origin.step} of run `{origin.run_id}`, merged into its base model. Nothing is "
        "rounded but to the base's own precision.\n\n"
        f"- Base: `{origin.base}`, sha256 `{origin.base_sha256 or '-'}`\n"
        f"- Trained on: `{origin.data}`, sha256 `{origin.data_sha256 or '-'}`\n"
        f"- Licence of the base: {origin.licence or 'not known'}\n"
    )
