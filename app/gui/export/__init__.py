"""The export wizard."""
