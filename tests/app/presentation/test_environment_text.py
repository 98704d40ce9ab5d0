"""What is said of an environment after its set-up."""

from __future__ import annotations

from agents.contract.environments import DeviceTrial, EnvironmentTrial
from agents.contract.node import EnvironmentReport
from app.presentation.environment_text import describe_environment, describe_trial


def test_an_environment_is_told_with_its_builder_and_its_devices() -> None:
    adopted = EnvironmentReport(python="/p", python_version="3.12.3", fits=True)
    assert describe_environment(adopted) == "Python 3.12.3"
    assert describe_trial(adopted) == ()
    devices = (
        DeviceTrial(device="cuda:0", name="RTX 4070", seconds=2.5),
        DeviceTrial(device="cuda:1", name="RTX 3090", problem="not tried: run r-1 uses it"),
    )
    built = EnvironmentReport(
        python="/p",
        python_version="3.12.3",
        built_with="uv 0.13.9",
        trial=EnvironmentTrial(import_s=3.0, torch="2.13.0+cu130", devices=devices),
    )
    assert describe_environment(built) == "Python 3.12.3, built with uv 0.13.9"
    assert describe_trial(built) == (
        "RTX 4070: one training step in 2.5 s",
        "RTX 3090: not tried: run r-1 uses it",
    )
