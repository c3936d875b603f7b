"""Metal: constant shapes, so that its pool of buffers serves each step from the step before."""
