"""Nodes, GPUs and links as the planner sees them."""
