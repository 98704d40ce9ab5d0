"""Sentences and labels shared by the window and the command line."""
