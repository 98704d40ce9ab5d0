"""One connection from a master: its server, its messages and the handlers that answer them."""
