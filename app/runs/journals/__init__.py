"""Data from the nodes: journals, logs and events, mirrored as plain files."""
