"""A run with token weights learns what a plain loop in torch learns, on any ranks.

The loop knows nothing of Rackless but the chat template: each answer's tokens count with the weight
of its message, and a batch's loss is the sum of weight times cross-entropy over the sum of weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from agents.contract.model_cut import ModelCut
from agents.contract.spec import AdapterSpec, DataSpec
from agents.trainer.data.examples import Example, Segment
from tests.agents.trainer.checkpoint.test_promises import file_hashes
from tests.agents.trainer.execution.test_executor import assert_same, gradients, make_executor, part
from tests.agents.trainer.ranks import Run, finish, make_environ, make_spec, run_trainers, start

__all__ = ["make_executor"]  # a fixture

NUM_ROWS, NUM_STEPS = 12, 4
WEIGHTS = (0.3, 1.0, 0.5, 2.0)
Weigh = Callable[[int], float]


def make_rows(path: Path, weigh: Weigh | None) -> list[dict[str, Any]]:
    """Write rows of two answers each, with `weigh(number)` as the weight of an answer."""
    rows = []
    for number in range(NUM_ROWS):
        messages: list[dict[str, Any]] = []
        for place in (2 * number, 2 * number + 1):
            messages.append({"role": "user", "content": "Who founded Brenford?"})
            answer = " ".join(["Oren Dale."] * (1 + 5 * place % 7))
            marks = {} if weigh is None else {"weight": weigh(place)}
            messages.append({"role": "assistant", "content": answer, **marks})
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def draw(place: int) -> float:
    return WEIGHTS[place % len(WEIGHTS)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Run]:
    """Train every run of this module."""
    home = tmp_path_factory.mktemp("weights")
    data = DataSpec(train="train.jsonl", eval="eval.jsonl")
    spec = make_spec(precision="fp64", data=data, evaluate_every_steps=1, max_steps=NUM_STEPS)
    full = replace(spec, adapter=AdapterSpec(kind="full"), learning_rate=1e-3)
    found: dict[str, Run] = {}
    environs: list[list[dict[str, str]]] = [[], []]

    def add(name: str, places: Sequence[int], **changes: Any) -> None:
        run = found[name]
        run.num_ranks = len(places)
        intent = run.intend(eval_path=str(run.home / "eval.jsonl"), **changes)
        for rank, place in enumerate(places):
            environs[place].append(make_environ(intent, rank, run.attempt_folder))

    for name, one, weigh, places, changes in (
        ("one", full, draw, (0,), {}),
        ("ones", spec, lambda place: 1.0, (1,), {}),
        ("two", replace(full, shares=(3.0, 1.0)), draw, (0, 1), {}),
        ("plain", spec, None, (0,), {}),
        ("halves", spec, lambda place: 0.5, (1,), {}),
        ("lora", spec, draw, (0,), {}),
        ("streamed", replace(spec, parallel="streamed"), draw, (1,), {}),
        (
            *("pipeline", replace(spec, parallel="pipeline"), draw, (0, 1)),
            {"cut": ModelCut(mode="pipeline", micro_sequences=4)},
        ),
    ):
        found[name] = Run(home / name, tiny_model, one)
        make_rows(found[name].train, weigh)
        make_rows(found[name].home / "eval.jsonl", weigh)
        add(name, places, **changes)
    add("lora", (0,), resume_step=NUM_STEPS // 2)
    codes = finish([start(run_trainers, one) for one in environs], timeout_s=400)
    assert codes == [0, 0]
    return found


def losses(run: Run, attempt: int = 1, rank: int = 0) -> dict[int, str]:
    return {step: line["loss_hex"] for step, line in run.steps(rank, attempt).items()}


def evaluated(run: Run, attempt: int = 1) -> list[float]:
    return [line["loss"] for line in run.journal(0, attempt) if line["kind"] == "eval"]


class PlainLoop:
    """Training of all weights with torch alone; each batch is all rows."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
        )

    def loss(self, rows: list[dict[str, Any]]) -> Tensor:
        total, weight = torch.zeros((), dtype=torch.float64), 0.0
        for row in rows:
            ids, weights = self._tokenize(row["messages"])
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, :-1]
            each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            total = total + (each * torch.tensor(weights[1:], dtype=torch.float64)).sum()
            weight += sum(weights[1:])
        return total / weight

    def _tokenize(self, messages: list[dict[str, Any]]) -> tuple[list[int], list[float]]:
        def render(count: int, *, prompt: bool) -> list[int]:
            text = self._tokenizer.apply_chat_template(
                messages[:count], tokenize=False, add_generation_prompt=prompt
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

        ids, weights = render(len(messages), prompt=False), []
        for place in range(1, len(messages), 2):
            weights += [0.0] * (len(render(place, prompt=True)) - len(weights))
            end = len(render(place + 1, prompt=False))
            weights += [messages[place]["weight"]] * (end - len(weights))
        return ids, weights

    def step(self, rows: list[dict[str, Any]], learning_rate: float, most: float) -> float:
        loss = self.loss(rows)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        return loss.item()


def test_one_process_and_two_with_uneven_shares_learn_what_a_plain_loop_learns(
    runs: dict[str, Run], tiny_model: Path
) -> None:
    rows = [json.loads(line) for line in runs["one"].train.read_text().splitlines()]
    loop, steps = PlainLoop(tiny_model), runs["one"].steps()
    assert list(steps) == list(range(1, NUM_STEPS + 1))
    most = runs["one"].spec.max_gradient_norm
    for step, line in steps.items():
        expected = loop.step(rows, line["learning_rate"], most)
        assert line["loss"] == pytest.approx(expected, rel=1e-6)
        with torch.no_grad():
            after = loop.loss(rows).item()
        assert evaluated(runs["one"])[step - 1] == pytest.approx(after, rel=1e-6)
    for rank in range(2):
        for step, line in runs["two"].steps(rank).items():
            assert line["loss"] == pytest.approx(steps[step]["loss"], rel=1e-12)
    assert evaluated(runs["two"]) == pytest.approx(evaluated(runs["one"]), rel=1e-12)
    tokens = [sum(line["tokens"] for line in runs["two"].steps(n).values()) for n in range(2)]
    assert tokens[0] > 2 * tokens[1] > 0


def test_weights_matter(runs: dict[str, Run]) -> None:
    assert losses(runs["lora"]) != losses(runs["plain"])


@pytest.mark.parametrize("name", ["ones", "halves"])
def test_the_same_weight_everywhere_is_no_weight(runs: dict[str, Run], name: str) -> None:
    assert losses(runs[name]) == losses(runs["plain"])
    assert evaluated(runs[name]) == evaluated(runs["plain"])


def test_streamed_layers_and_stages_learn_the_same(runs: dict[str, Run]) -> None:
    assert losses(runs["streamed"]) == losses(runs["lora"])
    found = {step: line["loss"] for step, line in runs["pipeline"].steps().items()}
    expected = {step: line["loss"] for step, line in runs["lora"].steps(0, 1).items()}
    assert found == pytest.approx(expected, rel=1e-10)
    assert evaluated(runs["pipeline"]) == pytest.approx(evaluated(runs["lora"]), rel=1e-10)


def test_a_resume_is_exact_to_the_last_bit(runs: dict[str, Run]) -> None:
    first, second = losses(runs["lora"], 1), losses(runs["lora"], 2)
    assert second == {step: first[step] for step in (3, 4)}
    assert evaluated(runs["lora"], 2) == evaluated(runs["lora"], 1)[2:]
    assert file_hashes(runs["lora"].checkpoint(NUM_STEPS))


def weigh(example: Example, weights: Sequence[float]) -> Example:
    (one,) = example.segments
    values = np.resize(np.array(weights, dtype=np.float32), len(one.ids))
    return Example((Segment(one.row, one.ids, one.is_target, values),))


def only(example: Example, weight: float) -> Example:
    """Return an example that learns the tokens with a weight alone, with weight 1."""
    (one,) = example.segments
    assert one.weights is not None
    return Example((Segment(one.row, one.ids, one.is_target & (one.weights == weight)),))


def test_gradients_are_the_weighted_sum_of_those_of_the_tokens(make_executor: Any) -> None:
    lengths = (30, 5, 17, 9)
    samples = []
    for number, length in enumerate(lengths, start=1):
        ids = np.arange(length, dtype=np.int32) * 7 % 700 + 6
        samples.append(Example((Segment(number, ids, np.arange(length) % 3 != 0),)))
    places = [11, 12, 13, 14]
    weighted = [weigh(one, (0.25, 3.0, 0.5, 0.25)) for one in samples[:3]] + samples[3:]
    found = gradients(make_executor(), weighted, places)
    assert_same(gradients(make_executor(micro_tokens=30), weighted, places), found)
    summed, loss = gradients(make_executor(), samples[3:], places[3:])
    for weight in (0.25, 0.5, 3.0):
        some, own = gradients(make_executor(), [only(o, weight) for o in weighted[:3]], places[:3])
        summed, loss = summed + weight * some, loss + weight * own
    # Norms of Llama round their gradients to float32.
    torch.testing.assert_close(found[0], summed, rtol=1e-5, atol=1e-6)
    assert found[1] == pytest.approx(loss, rel=1e-12)


def test_packed_rows_count_as_separate_ones(make_executor: Any) -> None:
    ids = np.arange(20, dtype=np.int32) + 6
    rows = [
        weigh(Example((Segment(row, ids[:size], np.arange(size) > 2),)), (0.5, 2.0, 7.0))
        for row, size in ((1, 20), (2, 9))
    ]
    plain = Example((Segment(3, ids[:12], np.arange(12) > 4),))
    packed = Example((*rows[0].segments, *plain.segments, *rows[1].segments))
    executor = make_executor()
    sums = []
    for examples in ([packed], [rows[0], plain, rows[1]]):
        executor.evaluate(part(examples, list(range(len(examples)))))
        sums.append(executor.loss_sum.item())
    assert sums[0] == pytest.approx(sums[1], rel=1e-12)
