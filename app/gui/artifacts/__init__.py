"""The Artifacts page and its dialogs."""
