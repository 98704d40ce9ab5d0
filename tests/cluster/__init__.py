"""A cluster for tests: network namespaces joined by a bridge, a real sshd in each."""
