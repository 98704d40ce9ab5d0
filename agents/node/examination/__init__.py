"""Examination of a node for the check: system, network, driver and WSL."""
