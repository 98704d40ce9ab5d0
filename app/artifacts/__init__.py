"""The user's artifacts: registered, copied, verified, served and deleted."""

RUNTIMES = ("vllm", "tgi", "llama.cpp", "ollama")
"""Programs that serve artifacts."""
