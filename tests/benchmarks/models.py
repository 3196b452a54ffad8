"""Four small models that are hard on a monitor in different ways, each with one batch and its optimizer.

| name | what | hard because |
|---|---|---|
| mlp | 20 linear layers of 512, batch 256 | large matrices: nothing hides a second pass over memory |
| gpt | 6 transformer blocks of width 256, 8 sequences of 128 tokens | large activations |
| conv | 6 residual blocks, 32 images of 32 x 32 | hardly any parameters, many activations |
| many | 400 linear layers of 64, batch 32 | Python a layer costs more than arithmetic |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Subject:
    """A model with what one training step of it needs."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def forward(self) -> Tensor:
        """The loss of the batch."""
        return F.cross_entropy(self.model(self.inputs), self.targets)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.into(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, heads))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self, words: int, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, width // 32) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


class ResidualBlock(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and width == out
        self.around = nn.Identity() if same else nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def _mlp(small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    width, depth, batch = (32, 3, 8) if small else (512, 20, 256)
    hidden = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10)), torch.randn(batch, width), torch.randint(10, (batch,))


def _gpt(small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    width, depth, length, batch = (32, 1, 8, 2) if small else (256, 6, 128, 8)
    tokens = torch.randint(512, (batch, length))
    return Transformer(512, width, depth, length), tokens, torch.randint(512, (batch * length,))


def _conv(small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    shapes = [(16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    size, batch = (8, 2) if small else (32, 32)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        *(ResidualBlock(*shape) for shape in shapes),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    return model, torch.randn(batch, 3, size, size), torch.randint(10, (batch,))


def _many(small: bool) -> tuple[nn.Module, Tensor, Tensor]:
    depth, batch = (20, 4) if small else (400, 32)
    return (
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth))),
        torch.randn(batch, 64),
        torch.randint(64, (batch,)),
    )


BUILDERS: dict[str, Callable[[bool], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "conv": _conv,
    "many": _many,
}


def build(name: str, *, small: bool = False) -> Subject:
    """The model of this name; a ``small`` one only shows that the harness works."""
    torch.manual_seed(0)
    model, inputs, targets = BUILDERS[name](small)
    # The fused step is the fastest on a CPU, so that shares of it are the strictest.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return Subject(name, model, optimizer, inputs, targets)
