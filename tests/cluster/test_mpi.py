"""Processes of `mpirun` are refused: each would train a model of its own."""

import pytest

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

STEP = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
        {"MV2_COMM_WORLD_RANK": "2", "MV2_COMM_WORLD_SIZE": "4"},
        {"PMI_RANK": "2", "PMI_SIZE": "4"},
        {**STEP, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},  # the step is that of mpirun's helpers
    ],
)
def test_one_of_several_is_refused(environ):
    with pytest.raises(InputError, match="one of 4, .* `srun` or `tfgpu launch -n 4`"):
        Cluster.from_environment(environ)
    assert Cluster.from_environment({**environ, "TF_CONFIG": "{}"}) == Cluster()


@pytest.mark.parametrize("environ", [{"PMI_RANK": "0", "PMI_SIZE": "1"}, {"OMPI_MCA_btl": "^openib"}])
def test_one_process(environ):
    assert Cluster.from_environment(environ) == Cluster()


def test_srun_with_pmi_is_slurms():
    assert Cluster.from_environment({**STEP, "PMI_RANK": "1", "PMI_SIZE": "2"}).source == "Slurm"
