"""Live figures of the cluster: stream, history, alerts and their texts. No Qt, no I/O."""
