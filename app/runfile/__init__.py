"""Run files: reading, writing, and the problems found in them."""
