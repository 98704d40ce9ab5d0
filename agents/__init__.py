"""Everything that runs on a node: pushed as one archive, needs only python3 until training."""
