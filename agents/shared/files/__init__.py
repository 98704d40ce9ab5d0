"""Files, folders, child processes and secrets."""
