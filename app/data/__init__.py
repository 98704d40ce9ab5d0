"""Looks through the rows of data on this PC."""
