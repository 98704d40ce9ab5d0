"""Chats with models, and comparing the answers of several."""
