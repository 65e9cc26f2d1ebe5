# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.checkpoint.evaluator import evaluate_checkpoints as evaluate_checkpoints
from tfgpu.parameter_server.worker_data import on_workers as on_workers
