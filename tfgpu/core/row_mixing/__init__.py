"""What looks at several rows of a batch: computed on all rows, or by sums over replicas."""
