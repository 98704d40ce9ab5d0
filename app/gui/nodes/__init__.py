"""The page of nodes and its dialogs."""
