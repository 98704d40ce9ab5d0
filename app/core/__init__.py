"""What a person can do with Rackless: one method per action, grouped by noun."""
