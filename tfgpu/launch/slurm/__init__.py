"""Slurm: a job's allocation, its batch file, and what the batch file and each of its tasks run."""
