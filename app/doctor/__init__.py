"""Collect what a helper will ask for into one file, without secrets."""
