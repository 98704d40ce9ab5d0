"""Planning and forecasts of runs, and learning from the runs that finished."""
