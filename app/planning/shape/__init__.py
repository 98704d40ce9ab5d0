"""Sizes of a model: its layers, parameters and adapters."""
