"""A sound run that meets one hard batch and closes soon after it: a spike, and nothing to page for."""

from __future__ import annotations

import time

import torch
from torch import nn

import gradexporter

STEPS = 46
HARD_BATCH = 40
"""The run ends while it is still in state spike: that is what must not look like a death."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, 1, generator=generator) * 0.5
    model = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.01), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002)

    monitor = gradexporter.watch(model, optimizer, hold_seconds=4)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(64, 16, generator=generator) * (8 if step == HARD_BATCH else 1)
        targets = inputs @ teacher + 0.3 * torch.randn(64, 1, generator=generator)
        optimizer.zero_grad()
        loss = monitor.observe(nn.functional.mse_loss(model(inputs), targets))
        loss.backward()
        optimizer.step()
        time.sleep(0.1)
    monitor.flush()
    assert monitor.report is not None
    print(monitor.report.state, [str(finding.kind) for finding in monitor.findings])
    monitor.close()


if __name__ == "__main__":
    main()
