"""What is said of a library that is not installed, or does not import beside this TensorFlow and NumPy."""

import importlib
import sys
from types import ModuleType

import pytest

import tfgpu
from tfgpu.data.sources import open_source
from tfgpu.data.storage.remote_files import _open
from tfgpu.data.storage.remote_records import _crc32c
from tfgpu.errors import InputError, MachineError
from tfgpu.launch.functions import pickled
from tfgpu.launch.spark import data as spark_data
from tfgpu.serving.formats import FORMATS
from tfgpu.tune import journal

CASES = [
    ("ray", lambda: tfgpu.launch.ray_job(print), "ray"),
    ("pyspark", lambda: tfgpu.launch.spark_job(print, None, global_batch=4), "spark"),
    ("pyarrow", spark_data.pyarrow, "spark"),
    ("cloudpickle", pickled._cloudpickle, "ray"),
    ("optuna", journal.optuna, "tune"),
    ("pyarrow", lambda: open_source("rows.csv"), "arrow"),
    ("tensorflow_datasets", lambda: open_source("tfds:mnist"), "tfds"),
    ("fsspec", lambda: _open("s3://bucket/shards"), "s3"),
    ("google_crc32c", _crc32c, "remote"),
    ("onnx", lambda: FORMATS["onnx"].check_installed(running=False), "export"),
    ("onnxruntime", lambda: FORMATS["onnx"].check_installed(running=True), "export"),
]
EACH = pytest.mark.parametrize(
    ("module", "call", "extra"), CASES, ids=[f"{module}-{extra}-{at}" for at, (module, _, extra) in enumerate(CASES)]
)


class Breaks:
    """Makes the import of a library fail as that of a release for other versions does."""

    def __init__(self, name, error):
        self.name, self.error = name, error

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise self.error


@pytest.fixture
def without(monkeypatch):
    def hide(library, error):
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Breaks(library, error), *sys.meta_path])

    return hide


@EACH
def test_the_error_names_the_reason_and_the_extra(module, call, extra, without, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("a,label\n1,0\n")
    without(module, ImportError("requires NumPy 2.0 or newer"))
    with pytest.raises((InputError, MachineError), match=rf"requires NumPy 2.0 .*pip install 'tfgpu\[{extra}\]'"):
        call()


def test_an_export_needs_a_library_that_fails_in_another_way(without):
    without("onnx", AttributeError("module 'ml_dtypes' has no attribute 'float4_e2m1fn'"))
    with pytest.raises(InputError, match=r"needs onnx \(module 'ml_dtypes' has no attribute 'float4_e2m1fn'\)"):
        FORMATS["onnx"].check_installed(running=False)


def test_tensorflow_datasets_that_has_swallowed_its_own_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", ModuleType("tensorflow_datasets"))
    with pytest.raises(MachineError, match="its own import failed"):
        open_source("tfds:mnist")
    assert importlib.import_module("tfgpu.data.prepared").shape_of("mnist") is None
