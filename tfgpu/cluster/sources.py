"""Finds out which launcher started this process."""

from collections.abc import Mapping

from tfgpu.cluster import kubernetes, mpi, slurm, tf_config


def read(environ: Mapping[str, str]) -> dict:
    """Tries TF_CONFIG, Slurm, Kubernetes and MPI in this order; the first that describes a cluster is used.

    A TF_CONFIG without a cluster means one process. If `mpirun` runs inside a Slurm step, the step's tasks are its
    helpers, so MPI's numbers take precedence over Slurm's.

    Returns:
        Keyword arguments of `Cluster`; empty for one process.
    """
    if environ.get("TF_CONFIG", "").strip():
        return tf_config.read(environ["TF_CONFIG"])
    step = slurm.read(environ)
    if step is not None and not _is_helpers(step, environ):
        return step
    return kubernetes.read(environ) or mpi.read(environ) or {}


def _is_helpers(step: dict, environ: Mapping[str, str]) -> bool:
    world = mpi.world(environ)
    size = len(step["workers"]) + len(step["parameter_servers"])
    return world is not None and world.size != size
