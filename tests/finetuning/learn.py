"""Trains by `finetune-text`, and saves the preset: `learn.py SETTINGS.json FOLDER`, also on several workers."""

import json
import sys
from pathlib import Path

import tfgpu
from tfgpu.attention import blockwise
from tfgpu.recipes import building, finetune, ready, recipe

BLOCK = 32  # queries: three blocks of a row


def learn(settings: dict, folder: Path) -> tuple[int, list[float]]:
    """The number of updates, and the losses of the epochs."""
    blockwise.BLOCK, before = BLOCK, blockwise.BLOCK
    what, cluster = recipe.make({**ready.read("finetune-text"), **settings}), tfgpu.Cluster.from_environment()
    try:
        with building.prepare(what):
            job = finetune.build(what, cluster)
            losses = job.model.fit(job.data.train, epochs=what.epochs, shuffle=False, verbose=0).history["loss"]
            job.finetuned.save(folder if cluster.is_chief else None)
    finally:
        blockwise.BLOCK = before
    return int(job.model.optimizer.iterations.numpy()), losses


if __name__ == "__main__":
    print(json.dumps(learn(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))))
