"""The engine: one training step on many replicas, and the block of steps that `fit` runs as one call."""
