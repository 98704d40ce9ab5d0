"""The wall of live GPUs."""
