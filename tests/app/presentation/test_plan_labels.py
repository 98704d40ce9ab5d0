"""The window names settings by the labels of its form, where the command line names keys."""

from __future__ import annotations

import re

import pytest

from agents.contract.spec import run_keys
from app.planning.plan import make_plan
from app.presentation.plan_text import use_labels
from tests.app.planning import random_clusters
from tests.app.planning.test_cases import plan

KEYS = re.compile(
    rf"(?<![\w.])({'|'.join(map(re.escape, run_keys()))}): "
    rf"|(?<![\w.])({'|'.join(re.escape(key) for key in run_keys() if re.search('[._]', key))})\b"
)


def test_a_refused_mode_names_the_label_of_its_setting() -> None:
    (row,) = plan("70B", "seven", optimizer="paged_adamw_8bit").refused
    shown = use_labels(row.text)
    assert 'Optimizer "AdamW, 8-bit, paged to RAM when VRAM is short" forbids it' in shown
    assert 'With Optimizer "AdamW":' in shown


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_no_sentence_of_a_plan_shows_a_key(seed: int) -> None:
    found = make_plan(random_clusters.draw_request(seed))
    texts = [one.text for one in (*found.refused, *found.advice)]
    texts += [one.reason for one in (found.chosen, *found.others) if one is not None]
    for text in texts:
        assert not KEYS.search(use_labels(text)), text
