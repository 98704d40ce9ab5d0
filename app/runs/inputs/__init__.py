"""Inputs of a run: model, data, and how they reach the nodes."""
