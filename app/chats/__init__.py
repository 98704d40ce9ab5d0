"""Chats with models, and comparisons of several models' answers."""
