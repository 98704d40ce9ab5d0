"""GPU memory of a run, part by part."""
