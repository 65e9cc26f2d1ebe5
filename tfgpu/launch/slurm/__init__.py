"""Slurm: a job's allocation, its batch file, and what the batch file and each task of it run."""
