"""The model hub: its token, on this PC and on nodes, and pushing to it."""
