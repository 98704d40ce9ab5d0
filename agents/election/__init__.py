"""Recovery of an attempt by its own nodes when no master is available."""
