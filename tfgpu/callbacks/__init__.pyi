# The public names, each with the module that holds it: type checkers read this file, and so does `__init__.py`.
from tfgpu.callbacks.averages import EvaluateAverages as EvaluateAverages
from tfgpu.callbacks.finite import SkipNaN as SkipNaN
from tfgpu.callbacks.finite import StopOnNaN as StopOnNaN
from tfgpu.callbacks.memory import Memory as Memory
from tfgpu.callbacks.metrics_file import EventsFile as EventsFile
from tfgpu.callbacks.metrics_file import MetricsFile as MetricsFile
from tfgpu.callbacks.monitor import Monitor as Monitor
from tfgpu.callbacks.progress import Progress as Progress
from tfgpu.callbacks.progress import Report as Report
from tfgpu.callbacks.tasks import Tasks as Tasks
from tfgpu.callbacks.tracking import Track as Track
from tfgpu.checkpoint.callback import Checkpoint as Checkpoint
