"""Sensors of a node, the recorder that samples them, and the ring of the last ten minutes."""
