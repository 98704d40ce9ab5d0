"""Our trainer's own process, with a measurement after its last step or in place of its search.

All else is as in a run: data path, model, layers, executor, strategy. What is measured goes to the
journal as records of the kind `probe`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What the loop of a rank works with."""

    context: Any
    state: Any
    executor: Any
    strategy: Any

    def report(self, **fields: Any) -> None:
        """Write a record of the kind `probe`."""
        self.context.journal.write("probe", **fields)

    def wait(self) -> float:
        """Return the time when the device has done all that was asked for."""
        import torch

        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        return time.perf_counter()

    def do_step(self, step: int) -> int:
        """Do a whole optimizer step as the loop does, at a rate of 0; return its tokens."""
        batch = self.strategy.choose_batch(step)
        self.strategy.add_gradients(batch, None)
        self.strategy.reduce()
        self.strategy.step_optimizer(self.strategy.average_gradients(), 0.0)
        self.wait()  # as the loop does when it reads the statistics
        return int(batch.num_tokens)


Probe = Callable[[TrainingParts], None]


def run_probed(
    environ: dict[str, str],
    probe: Probe | None,
    micro_tokens: int | None,
    slow_s: float,
    num_recomputed: int = 0,
) -> None:
    """Be a rank.

    Args:
        environ: Of the rank.
        probe: Called once the run's last step is done.
        micro_tokens: Instead of searching, use this size.
        slow_s: Seconds by which each decoder layer is slower for each token, forward and again
            backward.
        num_recomputed: With `micro_tokens`: layers that recompute; the others keep.
    """
    os.environ.update(environ)
    from agents.trainer import prepare, run
    from agents.trainer.__main__ import main

    if probe is not None:
        run.Loop = _add_probe(run.Loop, probe)  # type: ignore[misc]
    if micro_tokens is not None:
        fixed = _fix_setting(micro_tokens, num_recomputed)
        run.autotune.choose_setting = fixed  # type: ignore[assignment]
    if slow_s:
        prepare.build_trained_model = _slow_down(prepare.build_trained_model, slow_s)
    os._exit(main())


def _add_probe(loop_class: Any, probe: Probe) -> Any:
    class Probed(loop_class):  # type: ignore[misc]
        def __init__(
            self, context: Any, state: Any, schedule: Any, executor: Any, strategy: Any, *rest: Any
        ) -> None:
            super().__init__(context, state, schedule, executor, strategy, *rest)
            self._probed = TrainingParts(
                context=context, state=state, executor=executor, strategy=strategy
            )

        def run(self) -> tuple[int, str]:
            found: tuple[int, str] = super().run()
            probe(self._probed)
            return found

    return Probed


def _fix_setting(micro_tokens: int, num_recomputed: int) -> Any:
    def choose_setting(context: Any, state: Any, executor: Any, reserve: Any, resumed: Any) -> Any:
        from agents.trainer.autotune import SettingChoice, prove
        from agents.trainer.data.examples import choose_examples
        from agents.trainer.execution.setting import ExecutionSetting, apply_setting

        setting = ExecutionSetting(micro_tokens=micro_tokens, num_recomputed=num_recomputed)
        apply_setting(executor, setting)
        prove(executor, choose_examples(state.train, 0), evaluates=False)
        return SettingChoice(setting=setting, tried=[])

    return choose_setting


def _slow_down(build: Any, slow_s: float) -> Any:
    def build_slow(*args: Any, **more: Any) -> Any:
        from transformers.modeling_layers import GradientCheckpointingLayer

        model = build(*args, **more)
        rest = Rest(slow_s)
        for module in model.module.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.register_forward_hook(rest.follow)
        return model

    return build_slow


class Rest:
    """Keeps the device busy behind a layer, in proportion to its tokens.

    It stands outside of what is compiled, and is recorded with what is replayed.
    """

    def __init__(self, seconds_per_token: float) -> None:
        self.seconds_per_token = seconds_per_token
        """How long it rests; 0 for a card as fast as it is."""
        self._cycles_per_s: float | None = None
        self._function: Any = None

    def follow(self, module: Any, args: Any, output: Any) -> Any:
        """Sleep behind the forward pass, and have the backward pass sleep."""
        import torch

        rest = self

        if self._function is None:

            class Function(torch.autograd.Function):
                @staticmethod
                def forward(ctx: Any, hidden: Any) -> Any:
                    return hidden.view_as(hidden)

                @staticmethod
                def backward(ctx: Any, gradient: Any) -> Any:
                    rest.sleep(gradient)
                    return gradient

            self._function = Function
        hidden = output[0] if isinstance(output, tuple) else output
        self.sleep(hidden)
        if not torch.is_grad_enabled():
            return output
        hidden = self._function.apply(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def sleep(self, hidden: Any) -> None:
        """Keep the device busy for as long as a slow card computes these tokens."""
        import torch

        seconds = self.seconds_per_token * hidden.shape[-2]
        if not seconds:
            return
        if hidden.device.type != "cuda":
            time.sleep(seconds)
            return
        if self._cycles_per_s is None:  # the first pass is never recorded
            self._cycles_per_s = measure_cycles_per_s()
        torch.cuda._sleep(int(seconds * self._cycles_per_s))


def find_rest(model: Any) -> Rest | None:
    """Return what slows the layers of a model; None: nothing does."""
    for module in model.modules():
        for hook in module._forward_hooks.values():
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, Rest):
                return owner
    return None


def measure_cycles_per_s() -> float:
    """Return the rate of the clock that `torch.cuda._sleep` counts."""
    import torch

    cycles = 200_000_000
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    started = time.perf_counter()
    torch.cuda._sleep(cycles)
    torch.cuda.synchronize()
    return cycles / (time.perf_counter() - started)


def count_calls(module: Any) -> Iterator[int]:
    """Yield how often a module was called since the last time; the first value is 0."""
    counted = 0

    def add(*_: Any) -> None:
        nonlocal counted
        counted += 1

    handle = module.register_forward_pre_hook(add)
    try:
        while True:
            seen, counted = counted, 0
            yield seen
    finally:
        handle.remove()
