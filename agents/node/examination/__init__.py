"""Read what the check asks of a node: system, network, driver and WSL."""
