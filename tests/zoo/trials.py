"""A specimen trained for a few steps, watched or not, and what an independent reference says about it."""

from __future__ import annotations

import dataclasses
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import gradexporter
from gradexporter.records import StepReport
from tests.zoo.specimen import Specimen
from tests.zoo.wraps import Wrap, bare, unwrapped

STEPS = 3

MEASURED_CALLS = 16
"""Calls of one layer in one step that are measured in full."""

Expected = dict[str, float | None]
"""Some columns of one layer in one step, None where the layer has no such value."""


@dataclass
class Run:
    """What a training run leaves behind."""

    losses: list[bytes] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)
    random_state: bytes = b""
    said: set[str] = field(default_factory=set)
    """Warnings and log lines, of whomever."""
    layers: tuple[str, ...] = ()
    reports: list[StepReport] = field(default_factory=list)
    signals: Mapping[str, bool] = field(default_factory=dict)
    expected: list[dict[str, Expected]] = field(default_factory=list)
    """What each layer should show in each step."""


def train(
    specimen: Specimen, wrap: Wrap = bare, *, watched: bool = False, witnessed: bool = False, seed: int = 0
) -> Run:
    """Trains from fixed seeds; ``seed`` chooses the batches, which differ between ranks.

    A run that is not ``watched`` reads the gradients, a ``witnessed`` one the outputs too.
    """
    run = Run()
    _seed(0)
    model = specimen.model().train()
    net = wrap(model)
    optimizer = specimen.optimizer(net.parameters())
    witness = None if watched else Witness(net, outputs=witnessed)
    with _listening(run.said):
        monitor = gradexporter.watch(net, optimizer, serve=False) if watched else None
        try:
            _seed(1)
            for step in range(STEPS):
                batch = specimen.batch(torch.Generator().manual_seed(100 * seed + step))
                loss = specimen.loss(net, batch)
                if monitor is not None:
                    loss = monitor.observe(loss)
                loss.backward()
                if witness is not None:
                    run.expected.append(witness.read())
                optimizer.step()
                optimizer.zero_grad()
                run.losses.append(_bytes(loss))
                if monitor is not None and step in (0, STEPS - 1):
                    assert monitor.flush()
                    assert monitor.report is not None
                    run.reports.append(monitor.report)
            run.weights = {name: _bytes(value) for name, value in net.state_dict().items() if isinstance(value, Tensor)}
            run.random_state = _bytes(torch.get_rng_state())
            if monitor is not None:
                snapshot = monitor.snapshot
                assert snapshot is not None
                assert not any(snapshot.itself.failures.values()), snapshot.itself.failures
                run.layers, run.signals = snapshot.layers.names, snapshot.itself.signal_available
        finally:
            if monitor is not None:
                monitor.close()
    return run


def same(run: Run, other: Run) -> None:
    """Asserts that two runs computed the same bit for bit."""
    assert run.losses == other.losses
    assert run.weights.keys() == other.weights.keys()
    assert [name for name, value in run.weights.items() if other.weights[name] != value] == []
    assert run.random_state == other.random_state


def right(
    run: Run,
    reference: Run,
    *,
    steps: tuple[int, ...] = (0, STEPS - 1),
    columns: str = "",
    tolerance: float = 1e-5,
    absent: bool = False,
) -> None:
    """Asserts that layers are those of ``reference``, and in these steps the columns of this beginning too.

    With ``absent`` a value may be missing.
    """
    for step in steps:
        report = next(report for report in run.reports if report.step == step + 1)
        expected = reference.expected[step]
        assert report.layers.names == tuple(expected)
        for row in report.layers.rows():
            for column, value in expected[row.layer].items():
                if not column.startswith(columns):
                    continue
                measured, where = getattr(row, column), f"{column} of {row.layer} in step {report.step}"
                if value is None:
                    assert measured is None, f"{where} is {measured}, and should be absent"
                elif measured is not None or not absent:
                    assert measured == pytest.approx(value, rel=tolerance, abs=1e-30), where


class Witness:
    """Reads the gradients of a model, and by plain hooks its ``outputs``, in float64."""

    def __init__(self, model: nn.Module, *, outputs: bool) -> None:
        self._modules = {
            unwrapped(name) or "(root)": module
            for name, module in model.named_modules()
            if any(parameter is not None for parameter in module._parameters.values())
        }
        self._outputs: dict[str, list[list[Tensor]]] = {}
        """Tensors of each call."""
        if outputs:
            for name, module in self._modules.items():
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[..., None]:
        self._outputs[name] = []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if len(self._outputs[name]) < MEASURED_CALLS:
                self._outputs[name].append([_real(tensor).flatten() for tensor in _leaves(output)])

        return hook

    def read(self) -> dict[str, Expected]:
        """What was seen since the last reading."""
        named: set[int] = set()
        expected = {}
        for name, module in self._modules.items():
            fresh = [p for p in module._parameters.values() if p is not None and id(p) not in named]
            named |= {id(parameter) for parameter in fresh}
            expected[name] = _of_gradients([_real(p.grad).flatten() for p in fresh if p.grad is not None])
            if self._outputs:
                expected[name] |= _of_outputs([tensor for call in self._outputs[name] for tensor in call])
                self._outputs[name].clear()
        return expected


def _of_gradients(tensors: list[Tensor]) -> Expected:
    values = torch.cat(tensors) if tensors else torch.empty(0)
    there = bool(values.numel())
    return {
        "gradient_norm": values.norm().item() if there else None,
        "gradient_max_abs": values.abs().max().item() if there else None,
    }


def _of_outputs(tensors: list[Tensor]) -> Expected:
    values = torch.cat(tensors) if tensors else torch.empty(0)
    there = bool(values.numel())
    return {
        "activation_rms": values.square().mean().sqrt().item() if there else None,
        "activation_max_abs": values.abs().max().item() if there else None,
        "activation_zero_ratio": (values == 0).double().mean().item() if there else None,
    }


def _leaves(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point() or output.is_complex():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _leaves(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _leaves(value)
    elif dataclasses.is_dataclass(output):
        for item in dataclasses.fields(output):
            yield from _leaves(getattr(output, item.name))


def _real(tensor: Tensor) -> Tensor:
    tensor = _local(tensor)
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.to(torch.float64, copy=True)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _bytes(value: Tensor) -> bytes:
    return _local(value).resolve_conj().numpy().tobytes()


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@contextmanager
def _listening(said: set[str]) -> Iterator[None]:
    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.add(f"{record.name}: {record.getMessage()}")

    handler = Handler(logging.INFO)
    loggers = [logging.getLogger(name) for name in (None, "torch", "transformers", "gradexporter")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for logger in loggers:
            logger.addHandler(handler)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeHandler(handler)
            said |= {f"{warning.category.__name__}: {warning.message}" for warning in caught}
