"""Locks, package indexes and wheels."""
