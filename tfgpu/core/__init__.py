"""The engine: one training step on many replicas, and blocks of steps that `fit` runs in one call."""
