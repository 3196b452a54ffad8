"""Networks that read sequences, written with torch.nn alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.zoo.losses import classified, sentences
from tests.zoo.specimen import Specimen


class Recurrent(nn.Module):
    """A word model with a recurrent core that returns a tuple; word vectors are tied to the output."""

    def __init__(self, core: type[nn.Module], **settings: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.core = core(16, 16, num_layers=2, batch_first=True, **settings)
        self.head = nn.Linear(16, 32)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.core(self.embed(x))
        return self.head(out[..., :16])


class Packed(nn.Module):
    """A bidirectional GRU over a packed sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core = nn.Embedding(32, 16, padding_idx=0), nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([8, 7, 5, 3])
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(x), lengths, batch_first=True)
        out, _ = self.core(packed)
        return self.head(nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0])


class TCN(nn.Module):
    """Dilated causal convolutions under weight normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.convs = nn.ModuleList(
            parametrizations.weight_norm(nn.Conv1d(16, 16, 2, dilation=2**level)) for level in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.embed(x).transpose(1, 2)
        for level, layer in enumerate(self.convs):
            out = out + functional.dropout(
                functional.relu(layer(functional.pad(out, (2**level, 0)))), 0.1, self.training
            )
        return self.head(out.transpose(1, 2))


class Translator(nn.Module):
    """torch.nn.Transformer whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, 16), nn.Parameter(torch.zeros(8, 16))
        self.core = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(8)
        source = self.embed(x) + self.place
        return self.head(self.core(source, source.roll(1, 1), tgt_mask=mask, tgt_is_causal=True))


class Pointer(nn.Module):
    """An LSTM cell stepped by hand, attention over its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(32, 16), nn.LSTMCell(16, 16)
        self.query, self.head = nn.Bilinear(16, 16, 16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = memory = torch.zeros(len(x), 16)
        seen = []
        for word in self.embed(x).unbind(1):
            state, memory = self.cell(word, (state, memory))
            seen.append(state)
            past = torch.stack(seen, 1)
            weight = (past @ self.query(state, word)[:, :, None]).softmax(1)
            seen[-1] = state + (weight * past).sum(1)
        return self.head(torch.stack(seen, 1))


class Dilated(nn.Module):
    """WaveNet's gated blocks with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 8), nn.Conv1d(8, 32, 1)
        self.filters = nn.ModuleList(nn.Conv1d(8, 16, 2, dilation=2**level) for level in range(3))
        self.skips = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out, kept = self.embed(x).transpose(1, 2), torch.zeros(())
        for level, (layer, skip) in enumerate(zip(self.filters, self.skips, strict=True)):
            gated = functional.glu(layer(functional.pad(out, (2**level, 0))), 1)
            out, kept = out + gated, kept + skip(gated)
        return self.head(kept).transpose(1, 2)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    return nn.Sequential(
        nn.Embedding(32, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 32)
    )


def _of(name: str, model: Callable[[], nn.Module], batch: Any, loss: Any, **facts: Any) -> Specimen:
    return Specimen(name=name, family="sequence", model=model, batch=batch, loss=loss, **facts)


SPECIMENS = [
    _of("lstm", lambda: Recurrent(nn.LSTM), sentences, classified),
    _of("gru", lambda: Recurrent(nn.GRU, dropout=0.1), sentences, classified),
    _of("rnn", lambda: Recurrent(nn.RNN, bidirectional=True), sentences, classified),
    _of("packed gru", Packed, sentences, classified),
    _of("temporal convolution", TCN, sentences, classified),
    _of("wavenet", Dilated, sentences, classified),
    _of("torch transformer", Translator, sentences, classified),
    _of("torch encoder", _encoder, sentences, classified),
    _of("pointer", Pointer, sentences, classified),
]
