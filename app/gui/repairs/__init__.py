"""Check results, repairs and their undo."""
