"""Losses that a run minimizes: one module per objective, and their registry."""
