"""Networks of convolutions and patches written with torch.nn alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.losses import CLASSES, classified, grey, mlp, own, pictures
from tests.zoo.specimen import Specimen


def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Module:
    """Convolution, normalisation, activation in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        act(inplace=True),
    )


def head(features: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, CLASSES)]


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class Dense(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(functional.relu(self.norm(x)))], 1)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(functional.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection; with stochastic depth."""

    def __init__(self, channels: int, act: Any, drop: float = 0.0) -> None:
        super().__init__()
        wide = 4 * channels
        self.expand, self.depthwise = conv(channels, wide, 1, act=act), conv(wide, wide, 3, groups=wide, act=act)
        self.excite = SqueezeExcite(wide)
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        out = self.project(self.excite(self.depthwise(self.expand(x))))
        keep = torch.rand(len(x), 1, 1, 1) >= self.drop
        return x + out * keep / (1 - self.drop)


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8)
        self.branches = nn.ModuleDict({"one": conv(8, 4, 1), "three": conv(8, 4, 3), "five": conv(8, 4, 5)})
        self.auxiliary, self.head = nn.Sequential(*head(8)), nn.Sequential(*head(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.head(torch.cat([branch(x) for branch in self.branches.values()], 1))
        return functional.cross_entropy(out, y) + 0.3 * functional.cross_entropy(self.auxiliary(x), y)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = conv(1, 8), conv(8, 16), conv(16, 16)
        self.up2, self.up1 = nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.join2, self.join1, self.last = conv(32, 16), conv(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        out = self.middle(functional.max_pool2d(two, 2))
        out = self.join2(torch.cat([two, self.up2(out)], 1))
        out = self.join1(torch.cat([one, self.up1(out)], 1))
        return functional.mse_loss(self.last(out), x)


class Diffusion(nn.Module):
    """Predicts the noise in a picture, told the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16))
        self.enter, self.down, self.up = (
            nn.Conv2d(1, 16, 3, 1, 1),
            nn.Conv2d(16, 16, 3, 2, 1),
            nn.Conv2d(32, 16, 3, 1, 1),
        )
        self.norm, self.attend = nn.GroupNorm(4, 16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.leave = nn.Conv2d(16, 1, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        time, noise = torch.randint(1, 100, (len(x),)), torch.randn_like(x)
        angles = time[:, None] * torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        share = (time / 100)[:, None, None, None]
        first = self.enter((1 - share).sqrt() * x + share.sqrt() * noise)
        inner = functional.silu(self.norm(self.down(first)) + told)
        flat = inner.flatten(2).transpose(1, 2)
        inner = (flat + self.attend(flat, flat, flat)[0]).transpose(1, 2).view_as(inner)
        back = self.up(torch.cat([first, functional.interpolate(inner, scale_factor=2.0)], 1))
        return functional.mse_loss(self.leave(functional.silu(back)), noise)


class Capsules(nn.Module):
    """Routing by agreement, with weights that the module itself owns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 5, 4)
        self.weight = nn.Parameter(0.1 * torch.randn(1, 18, CLASSES, 6, 8))

    def forward(self, x: Tensor) -> Tensor:
        low = squashed(self.conv(x).reshape(len(x), -1, 8))
        votes = (self.weight @ low[:, :, None, :, None]).squeeze(-1)
        logits = torch.zeros(votes.shape[:-1])
        for _ in range(3):
            high = squashed((logits.softmax(2)[..., None] * votes).sum(1))
            logits = logits + (votes * high[:, None]).sum(-1)
        return high.norm(dim=-1)


def squashed(x: Tensor) -> Tensor:
    square = x.square().sum(-1, keepdim=True)
    return x * square / ((1 + square) * (square + 1e-8).sqrt())


class Mixer(nn.Module):
    def __init__(self, patches: int = 16, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.tokens = nn.ModuleList(mlp(patches, 32, patches) for _ in range(2))
        self.channels = nn.ModuleList(mlp(width, 32, width) for _ in range(2))
        self.patch, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        for at, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * at](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * at + 1](x))
        return self.head(x.mean(1))


class ConvLSTM(nn.Module):
    """One cell called for every frame."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.head = nn.Conv2d(1 + 8, 4 * 8, 3, 1, 1), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros(len(x), 8, 16, 16)
        for _ in range(3):
            enter, forget, leave, new = self.gates(torch.cat([x, state], 1)).chunk(4, 1)
            memory = forget.sigmoid() * memory + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * memory.tanh()
        return functional.mse_loss(self.head(state), x)


def _of(name: str, model: Callable[[], nn.Module], batch: Any, loss: Any, **facts: Any) -> Specimen:
    return Specimen(name=name, family="convolution", model=model, batch=batch, loss=loss, **facts)


SPECIMENS = [
    _of(
        "resnet",
        lambda: nn.Sequential(conv(3, 8), Residual(8, 8, 1), Residual(8, 16, 2), *head(16)),
        pictures,
        classified,
    ),
    _of(
        "vgg",
        lambda: nn.Sequential(
            conv(3, 8), nn.MaxPool2d(2), conv(8, 16), *head(16)[:2], nn.Dropout(), nn.Linear(16, CLASSES)
        ),
        pictures,
        classified,
    ),
    _of(
        "densenet",
        lambda: nn.Sequential(conv(3, 8), Dense(8, 4), Dense(12, 4), nn.AvgPool2d(2), *head(16)),
        pictures,
        classified,
    ),
    _of(
        "mobilenet",
        lambda: nn.Sequential(conv(3, 8), Inverted(8, nn.Hardswish), Inverted(8, nn.Hardswish), *head(8)),
        pictures,
        classified,
    ),
    _of(
        "efficientnet",
        lambda: nn.Sequential(conv(3, 8), Inverted(8, nn.SiLU, 0.2), Inverted(8, nn.SiLU, 0.2), *head(8)),
        pictures,
        classified,
    ),
    _of("inception", Inception, pictures, own),
    _of("unet", UNet, grey, own),
    _of("diffusion unet", Diffusion, grey, own),
    _of("capsules", Capsules, pictures, classified),
    _of("mixer", Mixer, pictures, classified),
    _of("convolutional lstm", ConvLSTM, grey, own),
]
