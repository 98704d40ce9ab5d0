"""The command line: one file per noun, each a thin layer over the methods of the core."""
