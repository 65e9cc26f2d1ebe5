"""The loop that a PyTorch user writes: batches in memory, Adam in one kernel, metrics read once per epoch."""

import torch
from torch import distributed
from torch.nn import functional

from benchmarks.peers import process
from benchmarks.peers.process import Task
from benchmarks.peers.torch_models import build
from benchmarks.peers.works import EPSILON


class Eager:
    """Eager; where there are several processes, DistributedDataParallel over gloo, each with its rows."""

    def __init__(self, task: Task):
        torch.set_num_threads(len(task.cores))
        self._processes = task.topology.processes
        self._model = build(task.work)
        self.parameters = sum(parameter.numel() for parameter in self._model.parameters())
        inputs, labels = (torch.from_numpy(part[:, task.rows].copy()) for part in task.work.data())
        if len(task.work.shape) == 3:  # the order of memory that PyTorch's convolutions are quickest in
            self._model = self._model.to(memory_format=torch.channels_last)
            inputs = inputs.permute(0, 1, 4, 2, 3)
        self._batches = list(zip(inputs, labels.long(), strict=True))
        if self._processes > 1:
            distributed.init_process_group(
                "gloo", init_method=f"tcp://{task.addresses[0]}", rank=task.rank, world_size=self._processes
            )
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        self._optimizer = torch.optim.Adam(
            self._model.parameters(), lr=task.work.learning_rate, eps=EPSILON, fused=True
        )
        self._forward = self._loss
        self.start()

    def _loss(self, x, y):
        logits = self._model(x)
        return functional.cross_entropy(logits.flatten(0, -2), y.flatten()), logits

    def start(self) -> None:
        """The next epoch begins with the first batch."""
        self._at = 0

    def epoch(self, steps: int) -> float:
        total, right = torch.zeros(()), torch.zeros((), dtype=torch.long)
        for _ in range(steps):
            x, y = self._batches[self._at % len(self._batches)]
            self._at += 1
            self._optimizer.zero_grad(set_to_none=True)
            loss, logits = self._forward(x, y)
            loss.backward()
            self._optimizer.step()
            total += loss.detach()
            right += (logits.detach().argmax(-1) == y).sum()
        if self._processes > 1:
            distributed.all_reduce(total)
            distributed.all_reduce(right)
        return float(total) / steps / self._processes

    def rounds(self, steps: int, channel: process.Channel) -> None:
        process.rounds(self, steps, channel)

    def facts(self) -> dict:
        return {}

    def last_word(self) -> dict:
        return {}


class Compiled(Eager):
    """Model and loss through `torch.compile`."""

    def __init__(self, task: Task):
        super().__init__(task)
        self._forward = torch.compile(self._loss)
