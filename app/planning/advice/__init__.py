"""Advice on a plan: what fits, what a change would bring, limits of nodes."""
