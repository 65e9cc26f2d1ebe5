"""Sparse gradients of tables: how replicas exchange them, and what one device has merged."""
