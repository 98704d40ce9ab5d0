"""The same small model and fork server as the trainer's tests."""

from tests.agents.trainer.conftest import fork_server, tiny_model

__all__ = ["fork_server", "tiny_model"]
