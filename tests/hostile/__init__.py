"""Attacks: what a stranger's node, model, data set, archive or card might try.

`sh installers/setup.sh test tests/hostile` runs them all and prints one line for each: what was
given, what it tried, and what happened.
"""
