"""Actions on runs: launch, watch, stop, resume, and what runs in the background."""
