"""Runs a Python function as the processes of one cluster: how it travels, its process, its restarts, its reports."""
