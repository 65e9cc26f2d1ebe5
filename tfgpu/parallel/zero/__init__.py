"""Sharded optimizer state, gradients and parameters (ZeRO, stages 1 to 3)."""
