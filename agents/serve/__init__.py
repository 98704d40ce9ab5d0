"""One connection from a master: its server, its messages and their handlers."""
