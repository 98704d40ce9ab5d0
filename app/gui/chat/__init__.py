"""Chat with models side by side."""
