"""Models are loaded where they fit, and compute on PCs without a compiler."""

import shutil

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from agents.quantizers.inference.models import ANSWER_TOKENS, continue_prompts, load_model
from tests.agents.trainer.ranks import DEMO


@pytest.mark.parametrize("has_compiler", [False, True])
def test_what_a_kernel_has_compiled_computes_without_a_compiler_too(monkeypatch, has_compiler):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/g++" if has_compiler else None)
    asked = []

    def compile_it(graph, inputs):
        asked.append(graph)
        if has_compiler:
            raise RuntimeError("Python.h is missing")
        return graph

    kernel = torch.compile(lambda x: x + 1, backend=compile_it)
    settings = torch._inductor.config.patch(compile_threads=4)
    with torch._dynamo.config.patch(suppress_errors=False), settings:
        try:
            load_model(DEMO / "model", "cpu")
            assert kernel(torch.ones(2)).tolist() == [2, 2]
            assert len(asked) == has_compiler
            assert torch._inductor.config.compile_threads == 1
        finally:
            torch.compiler.set_stance("default")
            torch._dynamo.reset()


def test_prompts_that_are_answered_at_once_are_answered_as_alone():
    model = load_model(DEMO / "model", "cpu").float()
    prompts = [[1, 5, 9, 20], [1, 7, 30, 8], [1, 4], [1, 40, 41, 42], [1, 6]]
    model.generation_config.eos_token_id = None
    alone = continue_prompts(model, prompts)
    assert all(len(answer) == ANSWER_TOKENS for answer in alone)
    model.generation_config.eos_token_id = [alone[1][5], 767]
    ended = continue_prompts(model, prompts)
    assert len(ended[1]) <= 6
    passes = []
    model.register_forward_pre_hook(lambda module, args, kwargs: passes.append(1), with_kwargs=True)
    assert continue_prompts(model, prompts, at_once=True) == ended
    assert len(passes) <= 2 * ANSWER_TOKENS
