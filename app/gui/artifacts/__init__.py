"""The page of artifacts and its dialogs."""
