"""Reductions, the same on every backend and against numpy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from gradexporter import stats
from gradexporter.stats import device, host, native

Measure = Callable[[Sequence[Tensor]], Any]


@pytest.fixture(params=["host", "device", "native"])
def measure(request: pytest.FixtureRequest) -> Measure:
    if request.param == "native":
        measure: Measure = request.getfixturevalue("native_kernels").measure
        return measure
    return host.measure if request.param == "host" else device.measure


def numbers(block: Any) -> np.ndarray:
    return block.numpy() if isinstance(block, Tensor) else block


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_norm_maximum_and_count_are_those_of_float64(measure: Measure, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator).to(dtype) for size in (1, 7, 64, 1000)]

    norms, largest, counts = numbers(measure(tensors))

    assert norms == pytest.approx([tensor.double().norm().item() for tensor in tensors], rel=1e-5)
    assert largest.tolist() == [tensor.double().abs().max().item() for tensor in tensors]
    assert counts.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("values", "norm", "largest", "count"),
    [
        ([3.0, -4.0], 5.0, 4.0, 0),
        ([0.0, 0.0], 0.0, 0.0, 0),
        ([1e25, 1e25], math.sqrt(2) * 1e25, 1e25, 0),
        ([3e38, -3e38], math.sqrt(2) * 3e38, 3e38, 0),
        ([3e-30, 4e-30], 5e-30, 4e-30, 0),
        ([1.0, math.nan], math.nan, math.nan, 1),
        ([1.0, math.inf, -math.inf], math.inf, math.inf, 2),
        ([math.nan, math.inf], math.nan, math.nan, 2),
    ],
)
def test_extreme_values(measure: Measure, values: list[float], norm: float, largest: float, count: int) -> None:
    block = numbers(measure([torch.tensor(values), torch.ones(2)]))

    assert block[0, 0] == pytest.approx(norm, rel=1e-6, nan_ok=True)
    assert block[1, 0] == pytest.approx(largest, rel=1e-6, nan_ok=True)
    assert block[2, 0] == count
    assert block[:, 1].tolist() == pytest.approx([math.sqrt(2), 1.0, 0.0])


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 40), elements=finite))
def test_the_norm_of_finite_values_is_finite_on_both_backends(values: np.ndarray) -> None:
    tensor = torch.from_numpy(values.copy())
    expected = float(np.linalg.norm(values.astype(np.float64)))

    for measure in (host.measure, device.measure):
        norm, largest, count = numbers(measure([tensor]))[:, 0]
        assert norm == pytest.approx(expected, rel=1e-5, abs=1e-50)
        assert largest == float(np.abs(values.astype(np.float64)).max())
        assert count == 0


@pytest.fixture
def accumulators(native_kernels: Any) -> Callable[[int], list[Any]]:
    return lambda layers: [
        host.Accumulator(layers),
        device.Accumulator(layers, torch.device("cpu")),
        native.Accumulator(layers),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_add_up_over_calls_on_every_backend(
    accumulators: Callable[[int], list[Any]], dtype: torch.dtype
) -> None:
    first = torch.tensor([0.0, -3.0, 4.0]).to(dtype)
    second = torch.tensor([[12.0, 0.0]]).to(dtype)
    for accumulator in accumulators(2):
        accumulator.add(1, first, full=True)
        accumulator.add(1, second, full=True)
        block = numbers(accumulator.take((1,)))

        assert block[:, 0].tolist() == pytest.approx([169.0, 12.0, 2.0, 5.0, 0.0])
        assert numbers(accumulator.take((0, 1))).tolist() == [[0.0, 0.0]] * 5


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sentinel_counts_non_finite_elements_and_nothing_else(
    accumulators: Callable[[int], list[Any]], full: bool, dtype: torch.dtype
) -> None:
    huge = torch.full((8,), torch.finfo(dtype).max, dtype=dtype)  # finite, though its sum is not
    broken = torch.tensor([1.0, math.nan, math.inf]).to(dtype)
    for accumulator in accumulators(1):
        accumulator.add(0, huge, full=full)
        assert numbers(accumulator.take((0,)))[4, 0] == 0
        accumulator.add(0, broken, full=full)
        assert numbers(accumulator.take((0,)))[4, 0] == 2


def test_an_infinite_output_has_an_infinite_maximum_and_a_nan_one_a_nan(
    accumulators: Callable[[int], list[Any]],
) -> None:
    for accumulator in accumulators(2):
        accumulator.add(0, torch.tensor([math.inf, -math.inf]), full=True)
        accumulator.add(1, torch.tensor([math.inf, math.nan]), full=True)
        accumulator.add(1, torch.tensor([1.0]), full=True)
        largest = numbers(accumulator.take((0, 1)))[1]

        assert largest[0] == math.inf
        assert math.isnan(largest[1])


def test_every_kind_of_tensor_is_brought_to_plain_values() -> None:
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    complex_ = torch.tensor([3 + 4j])
    eighth = torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)
    strided = torch.arange(6.0).reshape(2, 3).t()

    block = stats.measure([sparse, complex_, eighth, strided])

    assert block[0].tolist() == pytest.approx([5.0, 5.0, math.sqrt(5), math.sqrt(55)])
    assert block[1].tolist() == [4.0, 4.0, 2.0, 5.0]


def test_gradients_of_several_dtypes_are_measured_together() -> None:
    block = stats.measure([torch.ones(4), torch.ones(4, dtype=torch.float64), torch.ones(4, dtype=torch.bfloat16)])

    assert block[0].tolist() == [2.0, 2.0, 2.0]
