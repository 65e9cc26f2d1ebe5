"""`fit` under parameter servers: a coordinator deals batches, workers run closures of steps."""
