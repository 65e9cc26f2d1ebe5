"""What is said where an engine is not installed."""

import sys

import pytest

import tfgpu
from tfgpu.errors import InputError


@pytest.mark.parametrize(
    "module, call, extra",
    [
        ("ray", lambda: tfgpu.launch.ray_job(print), "ray"),
        ("pyspark.sql", lambda: tfgpu.launch.spark_job(print, None, global_batch=4), "spark"),
        ("pyspark.sql", lambda: tfgpu.launch.spark_predict(None, "model.keras", columns="a"), "spark"),
    ],
)
def test_the_error_names_the_extra(monkeypatch, module, call, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'tfgpu\[{extra}\]'"):
        call()
