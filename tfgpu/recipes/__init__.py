"""Training runs from recipes: schema, runner, run directory and report.

`tfgpu train` does this:

Example:
    from tfgpu.recipes import ready, recipe, runner
    what = recipe.make({**ready.read("digits"), "epochs": 3})
    result = runner.run(what, output="runs/mine")
    print(result.metrics, result.run_directory)
"""
