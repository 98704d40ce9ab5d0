"""What a run minimizes: one module per objective, and the registry that chooses."""
