"""Who this rank is and how it communicates: attempt, process group, device, journal, control."""
