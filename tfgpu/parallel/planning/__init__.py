"""Compares layouts of a model over devices by arithmetic, before anything runs."""
