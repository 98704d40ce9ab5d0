"""The most memory that the compiled backward pass of a recomputed layer takes, found on a CPU.

The compiler writes the code of the pass, which is then run with tensors that have no memory: its
kernels do nothing, and what the code allocates, reuses and deletes is counted.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from agents.contract.spec import RunSpec
from agents.trainer.execution import layers
from agents.trainer.kernels import compiling
from tests.app.planning import compiled_layer
from tests.app.planning.live_bytes import LiveBytes


class _Cut(Exception):
    """Raised when the backward pass is known."""


class _NoKernels:
    """Stands in for the compiler of kernels: what it makes does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: lambda *_, **__: None


def count_peak(family: str, spec: RunSpec, sizes: dict[str, int]) -> float:
    """Return the peak bytes for each token, with the layer's input and the incoming gradient."""
    made, layer, hidden, settings = compiled_layer.make_layer(family, spec, sizes)
    compiled_layer.fuse_linear(made)
    found: list[Any] = []

    def cut(joint, inputs, **more):
        found.append(
            min_cut_rematerialization_partition(joint, inputs, **{**more, "compiler": "inductor"})
        )
        raise _Cut

    def backend(graph, inputs):
        return aot_module_simplified(
            graph, inputs, fw_compiler=None, partition_fn=cut,
            decompositions=select_decomp_table(),
        )  # fmt: skip

    compiling.fix_settings()
    torch._dynamo.reset()
    compiled = torch.compile(layers._compute_recomputing, backend=backend, fullgraph=True)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=made.autocast):
            compiled(layer, hidden, (), settings)
    except Exception:
        if not found:
            raise
    finally:
        torch._dynamo.reset()
    angles = {tuple(settings["position_embeddings"][0].shape)}
    return _run(found[0][1], angles) / compiled_layer.TOKENS


def _write_code(module) -> str:
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    view_to_reshape(module)
    mode = detect_fake_mode(inputs)
    with V.set_fake_mode(mode):
        fake_tensor_prop(module, inputs)
        _recursive_post_grad_passes(module, is_inference=False)
        graph = GraphLowering(
            module, example_inputs=inputs, shape_env=mode.shape_env, is_backward=True
        )
        with V.set_graph_handler(graph), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            code = graph.codegen()[0]
    return getattr(code, "value", code)


def _run(module, shared_shapes: set[tuple[int, ...]]) -> int:
    """Return the peak of the live bytes; rotary angles and keys of dropout belong to no layer."""
    code = _write_code(module).replace("async_compile = AsyncCompile()", "async_compile = _NONE")
    names: dict[str, Any] = {"_NONE": _NoKernels(), "__name__": "pass"}
    exec(compile(code, "pass.py", "exec"), names)
    names["empty_strided_cpu"] = lambda size, stride, dtype: torch.empty_strided(
        size, stride, dtype=dtype, device="meta"
    )
    names["assert_size_stride"] = lambda *_, **__: None
    names["reinterpret_tensor"] = lambda one, *view: one.as_strided(*view)
    live, args, others = LiveBytes(), [], []
    for node in module.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta["val"]
        if isinstance(value, torch.SymInt):
            args.append(compiled_layer.TOKENS)
        elif isinstance(value, torch.Tensor):
            size = [
                compiled_layer.TOKENS if isinstance(one, torch.SymInt) else int(one)
                for one in value.shape
            ]
            is_own = any(isinstance(one, torch.SymInt) for one in value.shape)
            is_own = is_own and tuple(size) not in shared_shapes
            if is_own and value.dtype == torch.bfloat16:
                with live:
                    args.append(torch.empty(size, dtype=value.dtype, device="meta"))
            else:
                args.append(torch.empty(size, dtype=value.dtype, device="meta"))
                others.append(args[-1])  # alive, so that no other storage gets its address
        else:
            args.append(value)
    with live:
        names["call"](args)
    return live.peak
