"""What comes back from nodes: journals, logs and events, mirrored as plain files."""
