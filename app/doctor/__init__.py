"""Collect what support will ask for into one file, without secrets."""
