"""The master's memory: nodes, runs and their events, in one SQLite file.

The truth about a run lives on its nodes; this is a cache of intent that can be rebuilt from them,
so a lost or damaged file costs nothing but one query of every node.
"""
