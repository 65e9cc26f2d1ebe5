"""Finds out which launcher started this process."""

from collections.abc import Mapping

from tfgpu.cluster import kubernetes, slurm, tf_config, values
from tfgpu.errors import InputError

_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
"""The variables in which Open MPI, MVAPICH, and MPICH with its relatives tell the number of processes."""


def read(environ: Mapping[str, str]) -> dict:
    """Tries TF_CONFIG, Slurm and Kubernetes in this order; the first that describes a cluster is used.

    A TF_CONFIG without a cluster means one process.

    Returns:
        Keyword arguments of `Cluster`; empty for one process.

    Raises:
        InputError: a variable is malformed, or `mpirun` started the processes.
    """
    if environ.get("TF_CONFIG", "").strip():
        return tf_config.read(environ["TF_CONFIG"])
    found = slurm.read(environ) or kubernetes.read(environ) or {}
    count = len(found["workers"]) + len(found["parameter_servers"]) if found else 1
    size = next((text for name in _MPI_SIZES if (text := values.text(environ, name))), "1")
    # Inside a Slurm job, `mpirun` starts helpers by `srun`, whose step is not the training's.
    if size not in ("1", str(count)):
        raise InputError(
            f"`mpirun` started this process as one of {size}, and does not tell the addresses of the others. Start "
            f"them with `srun` or `tfgpu launch -n {size}` (--hosts for several machines). To train one model in each "
            "process, set TF_CONFIG='{}'."
        )
    return found
