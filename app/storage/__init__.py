"""The master's memory: nodes, runs and their events, in one SQLite file.

The truth about a run is on its nodes. This file is a cache that can be rebuilt from them, so its
loss costs only one query of every node.
"""
