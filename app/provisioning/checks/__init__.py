"""Judge the readings of nodes: one module of pure functions for each subject."""
