"""Recover an attempt by its own nodes while no master does."""
