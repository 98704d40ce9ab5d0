"""File transfer along a chain of nodes, each of which forwards chunks while it receives others."""
