"""Models and data that runs use, found on the master, the hub or the nodes."""
