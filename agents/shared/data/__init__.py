"""Data files: finding, reading and judging them."""
