"""What each worker does beside the others: they compare their calls, and name the one that does something else."""
