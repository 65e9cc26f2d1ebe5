# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.asynchronous.evaluation import evaluate_checkpoints as evaluate_checkpoints
from tfgpu.asynchronous.parameter_server import on_workers as on_workers
