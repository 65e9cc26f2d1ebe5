"""Adds the fingerprints of the installed versions to `fingerprints.json`: `python -m tfgpu.compat.record_fingerprints`.

A new target is first added there, as `"Owner._function": {}` or `"keras.Model.export": {}`. Run it without active
repairs, once for each supported version. It prints the targets that the version lacks.
"""

import json
from pathlib import Path

from tfgpu.compat import targets, versions


def main() -> None:
    """Writes the file and prints the missing targets."""
    import keras  # noqa: F401
    import tensorflow  # noqa: F401

    found = {target: dict(seen) for target, seen in targets.FINGERPRINTS.items()}
    for target in targets.TARGETS:
        owner, name = targets.locate(target)
        stock = getattr(owner, name, None)
        if stock is None:
            print(f"{target}: not in {versions.here('keras')}, {versions.here('tensorflow')}")
            continue
        module = getattr(owner, "__module__", None) or owner.__name__
        library = "tensorflow" if module.startswith("tensorflow") else "keras"
        mark = targets.fingerprint(stock)
        if mark is not None:
            seen = found.setdefault(target, {}).setdefault(mark, [])
            seen[:] = sorted({*seen, versions.here(library)})
    path = Path(targets.__file__).with_name("fingerprints.json")
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
