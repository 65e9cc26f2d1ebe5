"""Measurements: `make bench` for speed beside other frameworks, and one script for each other question."""
