"""The model hub: its token on this PC and on nodes, and pushing artifacts to it."""
