"""Runs a Python function as the processes of one cluster: its transport, its process, its reports, its result."""
