"""The training loop of the demo: a small network on scikit-learn's digits, seeded to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from gradexporter.demo.scenarios import Scenario, Trouble
from gradexporter.monitor import Monitor

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    raise ImportError(
        "the demo needs scikit-learn, the extra 'demo': pip install 'gradexporter[demo]', or in a checkout '.[demo]'"
    ) from error

BATCH = 16

IGNORED = -100
"""Label that cross-entropy leaves out."""


class Training:
    """A scenario under one seed: the model, its optimizer, and one step after another.

    Two of them with the same arguments are equal bit for bit, watched or not.
    """

    def __init__(self, scenario: Scenario, seed: int) -> None:
        # One thread: the network is so small that a second one only waits, for minutes on a busy machine.
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.scenario = scenario
        self.model = nn.Sequential(
            nn.Linear(64, 256),
            nn.LeakyReLU(0.01),
            nn.Linear(256, 128),
            nn.LeakyReLU(0.01),
            nn.Linear(128, 48),
            nn.LeakyReLU(0.01),
            nn.Linear(48, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=scenario.learning_rate, momentum=scenario.momentum)
        self._batches = _batches(seed)
        self._step = 0

    def step(self, monitor: Monitor | None = None) -> torch.Tensor:
        """Trains on the next batch and returns its loss."""
        self._step += 1
        pixels, labels = next(self._batches)
        if self._step == self.scenario.trouble_step:
            pixels, labels = _spoiled(self.scenario.trouble, pixels, labels)
        self.optimizer.zero_grad()
        loss = self._loss(self.model(pixels), labels)
        if monitor is not None:
            loss = monitor.observe(loss, inputs=pixels, targets=labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.scenario.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.scenario.clip_norm)
        self.optimizer.step()
        return loss.detach()

    def _loss(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.scenario.trouble is Trouble.LOG_OF_ZERO:
            shares = output.relu() / output.relu().sum(1, keepdim=True)
            return -(functional.one_hot(labels, 10) * shares.log()).sum(1).mean()
        return functional.cross_entropy(output, labels, ignore_index=IGNORED)


def _batches(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    generator = torch.Generator().manual_seed(1000 + seed)
    while True:
        order = torch.randperm(len(labels), generator=generator)
        for start in range(0, len(order) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield pixels[chosen], labels[chosen]


def _spoiled(trouble: Trouble, pixels: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if trouble is Trouble.LARGE_BATCH:
        return pixels * 100, labels
    if trouble is Trouble.NAN_PIXEL:
        pixels = pixels.clone()
        pixels[0, 0] = torch.nan
        return pixels, labels
    if trouble is Trouble.NO_TARGETS:
        return pixels, torch.full_like(labels, IGNORED)
    return pixels, labels
