"""Spark: which worker gets which rows, how they get there, and predictions over a DataFrame."""
