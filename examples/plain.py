"""A plain training loop with the two lines that watch it; runs in seconds on a CPU.

    python examples/plain.py

While it runs, http://localhost:10420/metrics has every series.
"""

import torch
from torch import nn

import gradexporter

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
teacher = torch.randn(32, 1)

monitor = gradexporter.watch(model, optimizer)
for _ in range(500):
    inputs = torch.randn(64, 32)
    loss = monitor.observe(nn.functional.mse_loss(model(inputs), inputs @ teacher))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

monitor.flush()
report = monitor.report
print(f"step {report.step}: {report.state}, loss {report.loss:.3g}, gradient norm {report.gradient_norm:.3g}")
monitor.close()
