"""The life of a run on the master: launch, follow, stop, resume, export."""
