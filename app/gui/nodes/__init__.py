"""The Nodes page and its dialogs."""
