import os
import signal
import sys

import pytest

from tfgpu.launch.child import Child


@pytest.mark.parametrize("runner", ["tfgpu.run", "tfgpu.launch.ending"])
def test_ctrl_c_while_python_starts_leaves_one_line(tmp_path, runner):
    (tmp_path / "train.py").write_text("print('began')\n")
    command = [sys.executable, "-m", runner, "train.py"]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    child = Child(0, command, environment, tmp_path / "heart", directory=str(tmp_path))
    child.start()
    child.send(signal.SIGINT)
    assert child.wait(500)
    told = [os.read(pipe, 2**16).decode() for pipe in child.streams]
    for pipe in list(child.streams):
        child.close(pipe)
    assert (child.code, told) == (130, ["", "Interrupted.\n"])
