"""The life of one attempt on one node: launch, the detached supervisor, stop, and what is known."""
