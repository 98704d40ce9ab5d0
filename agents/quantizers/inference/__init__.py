"""Loading and running models to measure them or to chat with them."""
