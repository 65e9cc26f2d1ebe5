"""One worker of `benchmarks.input_workers` on PyTorch: folder, side, worker, workers, batch."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Pictures(Dataset):
    """JPEGs by class, decoded to float32 in [0, 1]; counts what it decodes."""

    def __init__(self, folder: str):
        self.paths = sorted(Path(folder).rglob("*.jpg"))
        self.decoded = 0

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.decoded += 1
        path = self.paths[index]
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1).float() / 255, int(path.parent.name == "b")


def main(folder: str, side: str, worker: int, workers: int, batch: int) -> None:
    torch.set_num_threads(1)  # as in the loader's own worker processes
    pictures = Pictures(folder)
    sampler = DistributedSampler(pictures, num_replicas=workers, rank=worker, shuffle=True, seed=1)
    loader = DataLoader(pictures, batch_size=batch // workers, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        pictures.decoded = 0
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in loader:
            pass
        taken = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - begun}
    print(json.dumps(taken | {"decoded": pictures.decoded}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
