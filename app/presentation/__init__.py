"""The sentences and labels that the window and the command line share."""
