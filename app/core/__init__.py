"""Every action of a user as one class, performed by the core."""
