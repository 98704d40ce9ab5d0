"""Prepare Windows to carry a node in WSL: what would change, and the script that changes it."""
