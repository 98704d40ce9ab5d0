"""Advice on a plan: changes that make it fit or faster, and limits of nodes."""
