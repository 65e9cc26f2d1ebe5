import subprocess
import sys

import pytest


@pytest.mark.slow
def test_pipeline_is_the_function_whatever_was_imported_first():
    code = "import tfgpu.data.batches, tfgpu.data.sources; from tfgpu import data; assert callable(data.load)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=550)
