"""Prepare Windows to run a node in WSL: the plan of changes, and the script that applies them."""
