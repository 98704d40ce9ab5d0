"""Writing, verifying and resuming from checkpoints."""
