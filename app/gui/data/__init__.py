"""Data page: the rows of data, and their numbers."""
