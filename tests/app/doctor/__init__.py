"""The report for a helper."""
