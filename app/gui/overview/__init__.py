"""The Overview page with its live wall of GPUs."""
