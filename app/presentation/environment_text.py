"""Sentences about a training environment."""

from __future__ import annotations

from agents.contract.node import EnvironmentReport
from app.text import show_duration


def describe_environment(report: EnvironmentReport) -> str:
    """Return the Python version of an environment, and the tool that built it."""
    built = f", built with {report.built_with}" if report.built_with else ""
    return f"Python {report.python_version}{built}"


def describe_trial(report: EnvironmentReport) -> tuple[str, ...]:
    """Return a sentence for each tested device; empty: no test."""
    return tuple(
        f"{one.name}: {one.problem or f'one training step in {show_duration(one.seconds)}'}"
        for one in (report.trial.devices if report.trial else ())
    )
