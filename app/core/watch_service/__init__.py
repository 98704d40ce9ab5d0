"""Make `rackless watch` a service of the user."""
