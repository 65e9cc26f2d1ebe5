"""Spark: which worker gets which rows, how the rows get there, and predictions over a DataFrame."""
