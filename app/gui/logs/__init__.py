"""Showing logs."""
