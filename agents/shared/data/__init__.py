"""Data files: found, read and judged."""
