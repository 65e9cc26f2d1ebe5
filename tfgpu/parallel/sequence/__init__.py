"""Sequence parallelism: each device computes a part of the positions of every sequence."""
