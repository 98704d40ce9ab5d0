"""Every action of Rackless as one method, grouped by noun."""
