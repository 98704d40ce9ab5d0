"""What each step measures: statistics over ranks, times, FLOPs, traces."""
