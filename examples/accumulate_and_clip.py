"""Micro-batches, clipping and checkpoints: a step is one update, and its gradient is the one before clipping.

python examples/accumulate_and_clip.py
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import gradexporter

MICRO_BATCHES = 4

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
folder = Path(tempfile.mkdtemp())

with gradexporter.watch(model, optimizer, labels={"team": "examples"}, paging=False) as monitor:
    for step in range(1, 101):
        optimizer.zero_grad()
        for _ in range(MICRO_BATCHES):
            inputs = torch.randn(16, 32)
            targets = inputs[:, :10].argmax(1)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss / MICRO_BATCHES).backward()
            monitor.observe(loss)  # the loss of a step is the mean of what was observed
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        if step % 50 == 0:
            path = folder / f"step-{step}.pt"
            torch.save(model.state_dict(), path)
            monitor.checkpoint_saved(path)
    monitor.flush()
    report, snapshot = monitor.report, monitor.snapshot
    print(f"step {report.step}: {report.state}, loss {report.loss:.3g}")
    print(f"gradient norm {report.gradient_norm:.3g} before clipping, multiplied by {report.clip_factor:.3g}")
    print(f"newest clean checkpoint: step {snapshot.last_clean_checkpoint_step}")
