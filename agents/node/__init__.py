"""This PC as a node: its hardware, environments, packages, files and checkpoints."""
