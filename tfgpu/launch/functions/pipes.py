"""The pipes between a worker's process and the engine's process that started it, by the variables that name them."""

REPORTS = "TFGPU_REPORTS"
"""Holds the file descriptor to which reports are written, one JSON object a line."""
PARENT = "TFGPU_PARENT"
"""Holds the file descriptor of a pipe to read, whose other end lives as long as the parent."""
