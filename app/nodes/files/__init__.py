"""Copying files and folders between this PC and nodes."""
