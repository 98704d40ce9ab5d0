"""Exports: making an artifact from a run, with its request, plan, destination and device."""
