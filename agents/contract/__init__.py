"""Data and rules that the master and its agents share: the only part of agents that app imports."""
