"""Merge a model tensor by tensor, with only the largest tensor in memory, not the model."""
