"""How ranks share the work: the strategy of a run and what it needs."""
