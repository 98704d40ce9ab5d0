"""What this PC is and what it holds: hardware, environments, packages, files and checkpoints."""
