"""Configuring a run and seeing its plan."""
