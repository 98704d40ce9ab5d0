"""Data files as examples: read, turned into tokens, packed, cached and put in order."""
