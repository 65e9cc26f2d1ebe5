"""Starts training as the processes of one cluster: here, over ssh, by Slurm, Kubernetes, Ray or Apache Spark.

`tfgpu launch` takes a script; `ray_job` and `spark_job` take a Python function. Only the standard library is needed;
an engine's own library is imported when the engine is used.

Example:
    >>> import tfgpu
    >>> tfgpu.launch.Job("train.py", workers=2).max_restarts
    0
"""

# Imported here, not on first use: modules have the functions' names, and the last import wins.
from tfgpu.launch.functions.pickled import report
from tfgpu.launch.job import Job
from tfgpu.launch.ray_job import ray_job
from tfgpu.launch.restarts import Restarts
from tfgpu.launch.spark.job import spark_job

__all__ = ["Job", "Restarts", "ray_job", "report", "spark_job"]
