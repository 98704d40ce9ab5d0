"""Loading and running models to measure or to chat with them."""
