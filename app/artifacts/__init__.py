"""Artifacts as things one owns: registered, copied, checked, handed on, deleted."""

RUNTIMES = ("vllm", "tgi", "llama.cpp", "ollama")
"""Programs that serve artifacts."""
