"""Measurements of a user's own job: what is slow, and what would make it quicker."""
