"""Measurements of each step: statistics over ranks, times, FLOPs, traces."""
