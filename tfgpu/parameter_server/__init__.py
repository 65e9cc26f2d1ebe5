"""`fit` under parameter servers: a coordinator sends batches, workers run closures of steps."""
