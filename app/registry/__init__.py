"""Artifacts as things one owns: registered, copied, checked, handed on, deleted."""
