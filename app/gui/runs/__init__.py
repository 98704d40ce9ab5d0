"""Pages and dialogs of runs."""
