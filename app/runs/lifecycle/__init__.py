"""Actions on runs: launch, watch, stop, resume, and background tasks."""
