"""Merge a model tensor by tensor: what is in memory is the largest of them, not the model."""
