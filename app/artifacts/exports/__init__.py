"""Making an artifact from a run: request, plan, place and device."""
