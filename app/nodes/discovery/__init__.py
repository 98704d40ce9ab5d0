"""PCs that could become nodes."""
