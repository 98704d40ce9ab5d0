"""Options of a command that have a file of their own."""
