"""Models are loaded where they fit, and compute on PCs without a compiler."""

import shutil

import pytest
import torch
import torch._dynamo
import torch._inductor.config

from agents.quantizers.models import load_model
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
