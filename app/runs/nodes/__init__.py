"""Access of runs to nodes."""
