"""Coverage-guided fuzzing with atheris: `python tests/security/fuzz.py hostlist --seconds 60`.

Source: https://github.com/google/atheris
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["tfgpu", "yaml"]):
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    import targets

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("target", choices=targets.TARGETS)
parser.add_argument("--seconds", type=int, default=60)
options = parser.parse_args()
counts = {"tried": 0, "read": 0}
document = targets.documents().get(options.target)


def one(data: bytes) -> None:
    """Any text; for JSON targets, half of the time a valid document with changes."""
    given = atheris.FuzzedDataProvider(data)
    if document is not None and given.ConsumeBool():
        text = targets.mutated(document, lambda count: given.ConsumeIntInRange(0, count - 1))
    else:
        text = given.ConsumeUnicode(len(data))
    counts["tried"] += 1
    counts["read"] += targets.attempt(options.target, text, FOLDER)
    if time.monotonic() - began > options.seconds:
        print(f"{options.target}: {counts} in {time.monotonic() - began:.0f} s", flush=True)
        shutil.rmtree(FOLDER)
        os._exit(0)  # libFuzzer would end the process without running exit handlers


with tempfile.TemporaryDirectory() as folder:
    FOLDER = Path(folder)
    corpus, words = FOLDER / "corpus", FOLDER / "words"
    corpus.mkdir()
    samples = [*targets.DICTIONARY[options.target], *([targets.an_index()] if options.target == "index" else [])]
    for number, sample in enumerate(samples):
        (corpus / str(number)).write_text("\1" + sample)  # the first byte selects plain text
    for number in range(8 if document is not None else 0):
        (corpus / f"document{number}").write_bytes(bytes((number * 37 + at * 11) % 256 for at in range(60)) + b"\1")
    words.write_text("".join(f'"{"".join(f"{chr(92)}x{byte:02x}" for byte in w.encode())}"\n' for w in samples))
    limits = [f"-max_total_time={options.seconds + 60}", "-timeout=10", "-rss_limit_mb=2048", "-max_len=4096"]
    began = time.monotonic()
    atheris.Setup([sys.argv[0], *limits, f"-dict={words}", str(corpus)], one)
    atheris.Fuzz()
