"""Runs a Python function in the processes of one cluster: transport, process, reports and result."""
