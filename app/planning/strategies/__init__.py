"""Time and memory of each way to divide a run over GPUs."""
