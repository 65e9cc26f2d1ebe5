"""Batches, and one worker's rows of them, put together from examples that are read by place."""
