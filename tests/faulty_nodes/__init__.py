"""Faults of PCs and networks, put into nodes in namespaces, and what the check makes of them."""
