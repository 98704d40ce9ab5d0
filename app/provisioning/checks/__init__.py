"""Judge what nodes read of themselves: one module of pure functions for each subject."""
