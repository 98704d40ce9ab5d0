"""What a run trains on: models and data, found on the master, the hub or the nodes."""
