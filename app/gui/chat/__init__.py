"""The chat and comparison windows."""
