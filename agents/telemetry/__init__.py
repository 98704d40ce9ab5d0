"""What a node measures about itself: sensors, the sampler, and the ring of the last ten minutes."""
