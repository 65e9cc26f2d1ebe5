"""A training that is asked to leave: it saves, ends with exit code 75 on all workers, and loses nothing."""

import json
import random
import signal
import time

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("variant", "workers"), [("fit", 1), ("workers", 2)])
def test_sigterm_to_one_process_ends_all_and_the_next_start_resumes(variant, workers, tmp_path, group, result):
    options, rng = {"every_steps": None, "pause": 0.05}, random.Random(variant)
    whole = group(tmp_path / "whole", variant, workers=workers, **options)
    assert whole.wait() == [0] * workers, whole.said()
    cut = group(tmp_path / "cut", variant, workers=workers, own=True, **options)
    assert cut.kill_at(rng.randint(2, len(whole.progress()) - 3), rank=workers - 1, number=signal.SIGTERM), cut.said()
    began = time.monotonic()
    assert cut.wait() == [75] * workers, cut.said()
    seconds = time.monotonic() - began
    assert "Asked to leave by SIGTERM" in cut.said() and "Start the same command again" in cut.said()
    again = group(tmp_path / "cut", variant, workers=workers, **options)
    assert again.wait() == [0] * workers, again.said()
    arrays, history = result(tmp_path / "whole")
    found, found_history = result(tmp_path / "cut")
    differences = sum(a.tobytes() != b.tobytes() for a, b in zip(arrays, found, strict=True))
    print(json.dumps({"variant": variant, "seconds_to_exit": seconds, "differences": differences}))
    assert differences == 0 and found_history == history
