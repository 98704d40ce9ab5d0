"""What is fuzzed: each module has a tuple `TARGETS`."""
