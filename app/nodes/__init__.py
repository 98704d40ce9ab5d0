"""Reaching the nodes: addresses, connections, the agent's start, requests and files."""
