"""Nodes as runs use them."""
