"""Measurements; README.md beside this file lists each command and its last figures."""
