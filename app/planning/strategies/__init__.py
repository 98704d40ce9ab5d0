"""Time and memory of each parallelism mode."""
