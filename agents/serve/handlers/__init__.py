"""Map each request to its handler. A handler's module is imported at its first request.

A handler takes the Call and returns the result (a dataclass or plain values). It may raise
ExpectedError (the world's fault) or WireError (the arguments are wrong); the server answers for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

ROUTES = {
    "facts": "node.read_facts",
    "node.examine": "node.examine",
    "node.routes": "node.find_routes",
    "node.wake": "node.wake_other",
    "telemetry.follow": "telemetry.follow",
    "environment.find": "environment.find",
    "environment.build": "environment.build",
    "environment.tools": "environment.find_tools",
    "environment.uv": "environment.unpack_uv",
    "environment.python": "environment.bring_python",
    "environment.try": "jobs.try_environment",
    "environment.kept": "environment.list_kept",
    "environment.prune": "environment.prune",
    "storage.list": "storage.list_all",
    "storage.delete": "storage.delete",
    "wheels.look": "environment.look_for_wheels",
    "wheels.fetch": "environment.fetch_wheels",
    "packages.build": "environment.build_packages",
    "port.choose": "probes.choose_port",
    "probe.listen": "probes.listen",
    "probe.connect": "probes.connect",
    "probe.allreduce": "probes.allreduce",
    "attempt.launch": "attempts.launch",
    "attempt.confirm": "attempts.confirm",
    "attempt.own": "attempts.own",
    "attempt.status": "attempts.status",
    "attempt.list": "attempts.list_all",
    "attempt.stop": "attempts.stop",
    "attempt.keep": "attempts.keep",
    "attempt.wish": "attempts.wish",
    "stream.list": "streams.list_streams",
    "stream.read": "streams.read",
    "stream.follow": "streams.follow",
    "stream.unfollow": "streams.unfollow",
    "checkpoint.list": "runs.list_checkpoints",
    "checkpoint.verify": "runs.verify_checkpoint",
    "checkpoint.delete": "runs.delete_checkpoint",
    "run.fence": "runs.fence",
    "run.claim": "runs.claim",
    "run.delete": "runs.delete",
    "bundle.status": "runs.bundle_status",
    "files.places": "shared.find_places",
    "artifact.hash": "runs.hash_artifact",
    "artifact.delete": "runs.delete_artifact",
    "export.merged": "jobs.export_merged",
    "export.made": "jobs.export_made",
    "chat.open": "chats.open_chat",
    "chat.ask": "chats.ask",
    "chat.stop": "chats.stop",
    "chat.close": "chats.close",
    "data.preview": "jobs.preview_data",
    "gpu.calibrate": "jobs.calibrate",
    "logs.tail": "logs.read_tails",
    "model.config": "node.read_model_config",
    "model.inspect": "node.inspect_model",
    "hub.token": "node.update_token",
    "hub.snapshot": "node.find_hub_snapshot",
    "hub.fetch": "jobs.fetch_hub_model",
    "hub.offer": "node.offer_hub_snapshot",
    "hub.show": "node.show_hub_snapshot",
    "repair.preview": "repairs.preview",
    "change.list": "repairs.list_changes",
}
"""Request kind -> `module.function` in this package."""


def find_handler(kind: str) -> Callable[[Any], Any] | None:
    """Return the function that answers requests of this kind, None when there is none."""
    route = ROUTES.get(kind)
    if route is None:
        return None
    module, _, function = route.partition(".")
    handler: Callable[[Any], Any] = getattr(
        importlib.import_module(f"agents.serve.handlers.{module}"), function
    )
    return handler
