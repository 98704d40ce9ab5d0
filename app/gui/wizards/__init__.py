"""Wizards: a step at a time, left and taken up again as one likes."""
