"""What a worker's process shares with the engine's process that started it, by the variables that name it."""

REPORTS = "TFGPU_REPORTS"
"""Holds the file descriptor to which reports are written, one JSON object a line."""
PARENT = "TFGPU_PARENT"
"""Holds the file descriptor of a pipe to read, whose other end lives as long as the parent."""
FOLDERS = "TFGPU_FOLDERS"
"""Holds the folders to remove where the parent is killed before it can."""
