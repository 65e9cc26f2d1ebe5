"""A run from one recipe: schema, runner, run directory and report."""
