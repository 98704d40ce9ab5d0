"""The New run dialog and its live plan."""
