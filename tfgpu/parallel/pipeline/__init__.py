"""Pipeline parallelism: a model in stages, a batch in micro-batches."""
