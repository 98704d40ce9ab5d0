"""Live figures of the cluster: stream, history, alarms and the words for them. No Qt, no I/O."""
