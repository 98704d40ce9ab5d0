"""What the master remembers: nodes, runs and what happened to them, in one SQLite file.

The truth about a run lives on its nodes; this is a cache of intent that can be built again from
them, so that a lost or broken file costs nothing but one look at every node.
"""
