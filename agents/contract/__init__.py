"""What the master and its agents must agree on: the only part of agents that app imports."""
