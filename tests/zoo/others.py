"""Networks of many other kinds, written with torch.nn alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.zoo.losses import CLASSES, classified, curves, grey, mlp, own, regressed, rows
from tests.zoo.specimen import Batch, Specimen, real, sgd, whole


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.spread = (
            nn.Sequential(nn.Flatten(), mlp(256, 32, 32)),
            nn.Linear(32, 4),
            nn.Linear(32, 4),
        )
        self.decode = mlp(4, 32, 256)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x)
        mean, spread = self.mean(code), self.spread(code)
        drawn = mean + torch.randn_like(mean) * (spread / 2).exp()
        error = functional.binary_cross_entropy_with_logits(self.decode(drawn), x.flatten(1))
        return error - 0.01 * (1 + spread - mean.square() - spread.exp()).mean()


class VQVAE(nn.Module):
    """A code book that is looked up, never called."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Conv2d(1, 8, 4, 4), nn.ConvTranspose2d(8, 1, 4, 4)
        self.book = nn.Embedding(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        code = self.encode(x).movedim(1, -1)
        nearest = torch.cdist(code.detach().flatten(0, -2), self.book.weight.detach()).argmin(1)
        chosen = self.book.weight[nearest].view_as(code)
        drawn = code + (chosen - code).detach()
        kept = functional.mse_loss(chosen, code.detach()) + functional.mse_loss(code, chosen.detach())
        return functional.mse_loss(self.decode(drawn.movedim(-1, 1)), x) + kept


class Adversaries(nn.Module):
    """Generator and discriminator, the second under spectral normalisation; one loss for both."""

    def __init__(self) -> None:
        super().__init__()
        self.generate = mlp(4, 16, 256)
        self.judge = nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(256, 16)), nn.LeakyReLU(0.2), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        made = self.generate(torch.randn(len(x), 4))
        judged = functional.softplus(-self.judge(x.flatten(1))) + functional.softplus(self.judge(made.detach()))
        return judged.mean() + functional.softplus(-self.judge(made)).mean()


class Graph(nn.Module):
    """Two rounds of messages over a dense adjacency matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        near = (torch.cdist(x, x) < 3).float()
        near = near / near.sum(1, keepdim=True)
        return self.head(functional.elu(near @ self.second(functional.elu(near @ self.first(x)))))


class NeuralODE(nn.Module):
    """One field, called hundreds of times in a forward."""

    def __init__(self, calls: int = 200) -> None:
        super().__init__()
        self.enter, self.field, self.head = (
            nn.Linear(6, 8),
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
            nn.Linear(8, CLASSES),
        )
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        state = self.enter(x)
        for _ in range(self.calls):
            state = state + self.field(state) / self.calls
        return self.head(state)


class Recommender(nn.Module):
    """DLRM: bags of sparse embeddings beside dense features."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, 8, mode="sum", sparse=True) for _ in range(3))
        self.bottom, self.top = mlp(6, 16, 8), mlp(8 + 6, 16, 1)

    def forward(self, x: Tensor, categories: Tensor, y: Tensor) -> Tensor:
        parts = [self.bottom(x), *(bag(categories[:, at]) for at, bag in enumerate(self.bags))]
        crossed = torch.stack(parts, 1) @ torch.stack(parts, 2)
        low, high = torch.triu_indices(4, 4, 1)
        return functional.binary_cross_entropy_with_logits(self.top(torch.cat([parts[0], crossed[:, low, high]], 1)), y)


def clicks(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return real(generator, 8, 6), whole(generator, 8, 3, 4, below=50), whole(generator, 8, 1, below=2).float()


class Siamese(nn.Module):
    """One tower for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = mlp(6, 16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one, other = functional.normalize(self.tower(x)), functional.normalize(self.tower(x.flip(0)))
        same = (y == y.flip(0)).float() * 2 - 1
        return functional.cosine_embedding_loss(one, other, same)


class MixtureDensity(nn.Module):
    """Returns a dict of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(1, 16), nn.Tanh())
        self.heads = nn.ModuleDict({name: nn.Linear(16, 3) for name in ("share", "mean", "spread")})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        trunk = self.trunk(x)
        return {name: layer(trunk) for name, layer in self.heads.items()}


def mixed(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    out = model(x)
    parts = torch.distributions.Normal(out["mean"], out["spread"].exp()).log_prob(y) + out["share"].log_softmax(-1)
    return -parts.logsumexp(-1).mean()


class Coupling(nn.Module):
    """A normalising flow: affine couplings, log determinant returned beside the value."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(3, 16, 6) for _ in range(4))
        self.scale = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        volume = torch.zeros(len(x))
        for net, scale in zip(self.nets, self.scale, strict=True):
            stretch, shift = net(left).chunk(2, 1)
            stretch = stretch.tanh() * scale
            left, right = right * stretch.exp() + shift, left
            volume = volume + stretch.sum(1)
        return (torch.cat([left, right], 1).square().sum(1) / 2 - volume).mean()


class Adapted(nn.Module):
    """LoRA: a frozen layer and two small trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(6, 16), nn.Linear(6, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.head = nn.Linear(16, CLASSES)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.relu(self.base(x) + self.up(self.down(x))))


class Hyper(nn.Module):
    """A network that makes the weights of another, which is called functionally."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.head = nn.Linear(2, 6 * 8 + 8), nn.Linear(8, CLASSES)
        self.task = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        made = self.make(self.task)
        return self.head(functional.linear(x, made[:48].view(8, 6), made[48:]).relu())


class Equilibrium(nn.Module):
    """A fixed point found without a graph and taken through once with one."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        entered, state = self.enter(x), torch.zeros(len(x), 8)
        with torch.no_grad():
            for _ in range(10):
                state = torch.tanh(self.cell(state) / 2 + entered)
        return self.head(torch.tanh(self.cell(state) / 2 + entered))


class Physics(nn.Module):
    """A physics-informed network: its loss holds a derivative, taken with create_graph."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        out = self.net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (slope + out).square().mean() + functional.mse_loss(out, y)


class Spectrum(nn.Module):
    """A Fourier operator with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(4, dtype=torch.cfloat))
        self.local = nn.Conv1d(1, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        wave = x.view(1, 1, -1)
        out = torch.fft.irfft(torch.fft.rfft(wave)[..., :4] * self.weight, n=8) + self.local(wave)
        return functional.mse_loss(out.view_as(y), y)


class Actor(nn.Module):
    """Policy and value from one trunk, as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.policy, self.value = nn.Linear(6, 16), nn.Linear(16, CLASSES), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> tuple[torch.distributions.Categorical, Tensor]:
        trunk = functional.relu(self.trunk(x))
        return torch.distributions.Categorical(logits=self.policy(trunk)), self.value(trunk)


def rewarded(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    policy, value = model(x)
    gain = y[:, None] - value
    return (
        -policy.log_prob(policy.sample())[:, None] * gain.detach() + gain.square()
    ).mean() - 0.01 * policy.entropy().mean()


def _sine() -> nn.Module:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(5 * x)

    return nn.Sequential(nn.Linear(1, 16), Sine(), nn.Linear(16, 16), Sine(), nn.Linear(16, 1))


def _of(name: str, model: Callable[[], nn.Module], batch: Any, loss: Any, **facts: Any) -> Specimen:
    return Specimen(name=name, family="other", model=model, batch=batch, loss=loss, **facts)


SPECIMENS = [
    _of(
        "autoencoder",
        lambda: nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 6)),
        lambda generator: (real(generator, 8, 6),) * 2,
        regressed,
    ),
    _of("variational autoencoder", VAE, grey, own),
    _of("vector quantised autoencoder", VQVAE, grey, own),
    _of("adversaries", Adversaries, grey, own),
    _of("graph network", Graph, rows, classified),
    _of("neural ode", NeuralODE, rows, classified),
    _of("recommender", Recommender, clicks, own, optimizer=sgd),
    _of("siamese", Siamese, rows, own),
    _of("mixture density", MixtureDensity, curves, mixed),
    _of("normalising flow", Coupling, rows, own),
    _of("low-rank adapter", Adapted, rows, classified),
    _of("hypernetwork", Hyper, rows, classified),
    _of("equilibrium", Equilibrium, rows, classified),
    _of("physics-informed", Physics, curves, own),
    _of("fourier operator", Spectrum, curves, own),
    _of("actor-critic", Actor, rows, rewarded),
    _of("sine network", _sine, curves, regressed),
]
