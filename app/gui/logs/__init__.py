"""A log viewer for files of any length."""
