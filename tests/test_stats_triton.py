"""The Triton kernel, in Triton's interpreter where there is no device; slow, for Triton is a large package."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gradexporter.fence import Fence
from gradexporter.stats import device, kernels

COMPARISON = """
    import numpy as np, torch
    from gradexporter.stats import device, multi_tensor

    multi_tensor.CHUNK = 4096  # several to a tensor, without an interpreter's minutes
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in (1, 4095, 4096, 4097, 9000)]
    tensors += [torch.zeros(3), torch.full((5000,), 1e25), torch.full((10,), 1e-30), torch.randn(8, 9).t()]
    tensors += [torch.tensor([1.0, torch.nan, -torch.inf]), torch.full((4200,), torch.inf), torch.randn(70).half()]
    tensors += [torch.randn(5000).bfloat16(), torch.randn(4100).double(), torch.randn(()), torch.randn(9)[3:]]
    tensors = [tensor.to(place) for tensor in tensors]
    for _ in range(2):  # the second time with tables that are there
        mine, theirs = (each.measure(tensors).cpu().numpy() for each in (multi_tensor, device))
        assert np.allclose(mine[0], theirs[0], rtol=1e-6, atol=0, equal_nan=True), (mine[0], theirs[0])
        assert np.array_equal(mine[1:], theirs[1:], equal_nan=True), (mine, theirs)
"""


@pytest.mark.slow
def test_the_kernel_measures_what_stock_operations_measure() -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    environ = os.environ if torch.cuda.is_available() else {**os.environ, "TRITON_INTERPRET": "1"}

    subprocess.run([sys.executable, "-c", textwrap.dedent(COMPARISON)], check=True, timeout=240, env=environ)


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> Fence:
    """Somebody asks for native kernels, and what lies on the CPU passes for a device."""
    monkeypatch.setattr(kernels, "process", kernels.Kernels())
    monkeypatch.setattr(device, "tell_fault", kernels.process.fault)
    monkeypatch.setattr(device, "triton_failed", False)
    monkeypatch.setattr(device, "by_triton", False)
    monkeypatch.setattr(device, "measurable_by_triton", lambda tensors: True)
    fence = Fence()
    monkeypatch.setattr(kernels.process, "_unavailable", "not asked here")
    kernels.process.ask(fence, "native", fence.record)
    assert device.by_triton
    return fence


def test_the_first_fault_puts_stock_operations_back_for_good_and_is_counted_once(
    wanted: Fence, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Sequence[Tensor]] = []

    class Broken:
        @staticmethod
        def measure(tensors: Sequence[Tensor]) -> Tensor:
            calls.append(tensors)
            raise RuntimeError("out of resources")

    monkeypatch.setitem(sys.modules, "gradexporter.stats.multi_tensor", Broken)  # type: ignore[misc]
    monkeypatch.setattr("gradexporter.stats.multi_tensor", Broken, raising=False)
    blocks = [device.measure([torch.ones(4)]) for _ in range(3)]
    kernels.process.ask(wanted, "native", wanted.record)  # a watch that comes later does not bring it back

    assert [block[:, 0].tolist() for block in blocks] == [[2.0, 1.0, 0.0]] * 3
    assert len(calls) == 1
    assert wanted.failures["kernels"] == 1
    assert not device.by_triton
