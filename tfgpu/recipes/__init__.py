"""Training runs from recipes: schema, runner, run directory and report."""
