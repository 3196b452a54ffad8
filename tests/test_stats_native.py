"""Native kernels against stock ones and against float64, over everything that a tensor can be."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from gradexporter import stats
from gradexporter.monitor import Monitor
from gradexporter.records import StepReport
from gradexporter.stats import host, native

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def filled(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_as_float64(library: native.Library, tensors: list[Tensor]) -> None:
    """Norms within 1e-6, maxima and counts to the bit."""
    block = library.measure(tensors)

    assert block is not None
    for (norm, largest, count), tensor in zip(block.T, tensors, strict=True):
        values = tensor.detach().double().reshape(-1)
        top = values.abs().max().item() if values.numel() else 0.0
        unit = top if 0 < top < math.inf else 1.0
        assert norm == pytest.approx((values / unit).norm().item() * unit, rel=1e-6, nan_ok=True)
        assert largest == top or (math.isnan(largest) and math.isnan(top))
        assert count == (~torch.isfinite(values)).sum().item()


@every_dtype
def test_every_size_around_lanes_and_chunks_is_measured_whole(
    native_library: native.Library, dtype: torch.dtype
) -> None:
    sizes = [1, 2, 63, 64, 65, 127, 2047, 2048, 2049, 4096, 6000, 70_001]

    assert_as_float64(native_library, [filled(size, dtype=dtype, seed=size) for size in sizes])


@every_dtype
def test_every_layout_is_measured_by_its_elements_and_not_by_its_memory(
    native_library: native.Library, dtype: torch.dtype
) -> None:
    base = filled(8, 6, 10, 12, dtype=dtype)
    guarded = torch.full((100,), torch.nan, dtype=dtype)
    guarded[3:50] = 2.0

    assert_as_float64(
        native_library,
        [
            base,
            base.contiguous(memory_format=torch.channels_last),
            base.transpose(1, 3),  # without gaps, in another order
            base[:, ::2],  # with gaps
            base[1:, 1:, 1:, 1:],
            base[0, 0, 0, :1].expand(50),  # one element, fifty times
            base[0, 0, 0, 0],  # no dimension
            guarded[3:50],  # NaN on both sides
            base.permute(3, 0, 2, 1)[3],
        ],
    )


@every_dtype
def test_addresses_need_no_alignment(native_library: native.Library, dtype: torch.dtype) -> None:
    values = filled(5000, dtype=dtype)
    memory = torch.zeros(5000 * dtype.itemsize + 1, dtype=torch.uint8)
    memory[1:] = values.view(torch.uint8)
    odd = torch.frombuffer(memory.numpy(), dtype=dtype, offset=1)

    assert odd.data_ptr() % 2 == 1 or dtype.itemsize == 1
    assert_as_float64(native_library, [odd])


@every_dtype
@pytest.mark.parametrize("seed", range(3))
def test_bits_of_any_kind_are_read_as_torch_reads_them(
    native_library: native.Library, dtype: torch.dtype, seed: int
) -> None:
    """Random bits: every exponent, subnormals, both infinities, NaNs of every payload."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (30_000 * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)
    finite = bits[torch.isfinite(bits)]

    assert_as_float64(native_library, [bits, finite, finite[finite.abs() < torch.finfo(dtype).smallest_normal]])


@every_dtype
def test_a_whole_tensor_of_one_odd_value(native_library: native.Library, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, info.max, -info.max, info.tiny, info.smallest_normal / 4]

    assert_as_float64(native_library, [torch.full((3000,), value, dtype=dtype) for value in values])


@pytest.mark.parametrize("magnitude", [1e300, 1e-300, 1e-310, 5e-324])
def test_the_norm_of_doubles_is_finite_where_their_squares_are_not(
    native_library: native.Library, magnitude: float
) -> None:
    assert_as_float64(native_library, [torch.full((4000,), magnitude, dtype=torch.float64)])


def test_a_large_chunk_beside_a_small_one_loses_neither(native_library: native.Library) -> None:
    mixed = torch.cat([torch.full((2048,), 1e-30), torch.full((2048,), 1e30), torch.full((100,), 1.0)])

    assert_as_float64(native_library, [mixed, mixed.flip(0), torch.full((5000,), 1e-30)])


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None)
@given(hnp.arrays(np.float32, st.integers(1, 200), elements=finite32))
def test_the_norm_of_finite_values_is_finite(native_library: native.Library, values: np.ndarray) -> None:
    assert_as_float64(native_library, [torch.from_numpy(values.copy())])


def test_dtypes_and_layouts_are_mixed_in_one_list(native_library: native.Library) -> None:
    tensors = [filled(300, dtype=dtype) for dtype in DTYPES] + [filled(20, 20)[:, ::2], filled(2, dtype=torch.float16)]

    assert_as_float64(native_library, tensors)


def test_without_norms_only_the_first_row_is_missing(native_library: native.Library) -> None:
    tensors = [filled(3000), torch.tensor([1.0, math.nan]), torch.tensor([-math.inf]), filled(20, 20)[:, ::2]]
    block, whole = native_library.measure(tensors, norms=False), native_library.measure(tensors)

    assert block is not None
    assert whole is not None
    assert np.isnan(block[0]).all()
    assert np.array_equal(block[1:], whole[1:], equal_nan=True)


@pytest.mark.parametrize(
    "odd",
    [
        torch.eye(3).to_sparse(),
        pytest.param(torch.eye(3).to_mkldnn(), id="mkldnn"),
        torch.tensor([1 + 2j]),
        torch.tensor([1.0]).to(torch.float8_e4m3fn),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.int64),
    ],
    ids=lambda odd: f"{odd.layout}-{odd.dtype}-{odd.device}",
)
def test_what_is_no_plain_memory_is_left_to_stock_operations(native_library: native.Library, odd: Tensor) -> None:
    assert native_library.measure([torch.ones(2), odd]) is None


def test_a_tensor_of_zeros_without_memory_is_zero(native_library: native.Library) -> None:
    block = native_library.measure([torch._efficientzerotensor((3,)), torch.ones(4)])

    assert block is not None
    assert block.tolist() == [[0.0, 2.0], [0.0, 1.0], [0.0, 0.0]]


def test_freed_memory_is_not_read(native_library: native.Library) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)

    with pytest.raises(RuntimeError, match="freed"):
        native_library.measure([freed])


def test_the_gradients_of_a_graph_are_measured_without_one(native_kernels: native.Library) -> None:
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)

    assert stats.measure([gradient])[:, 0].tolist() == pytest.approx([math.sqrt(27), 3.0, 0.0])


@every_dtype
def test_outputs_are_counted_as_stock_operations_count_them(native_kernels: Any, dtype: torch.dtype) -> None:
    outputs = [
        filled(9, 700, dtype=dtype).relu(),
        filled(5, 40, dtype=dtype).t(),
        filled(30, 30, dtype=dtype)[::3],
        torch.tensor([0.0, -0.0, math.inf, math.nan, 1.0]).to(dtype),
        torch.zeros(3000, dtype=dtype),
    ]
    mine, theirs = native.Accumulator(3), host.Accumulator(3)
    for accumulator in (mine, theirs):
        for output in outputs[:3]:
            accumulator.add(0, output, full=True)
        for output in outputs[3:]:
            accumulator.add(2, output, full=True)
        for output in outputs:
            accumulator.add(1, output, full=False)

    ours, stock = mine.take((2, 0, 1)), theirs.take((2, 0, 1))

    assert np.array_equal(ours[1:], stock[1:], equal_nan=True)
    assert ours[0] == pytest.approx(stock[0], rel=2e-6, nan_ok=True)
    assert not mine.take((0, 1, 2)).any()


def test_a_library_that_comes_in_the_middle_of_a_step_takes_over(
    native_library: native.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = native.Accumulator(2)
    monkeypatch.setattr(native, "current", None)
    accumulator.add(0, torch.tensor([3.0, 0.0]), full=True)
    monkeypatch.setattr(native, "current", native_library)
    accumulator.add(0, torch.tensor([-4.0, math.nan, 0.0]), full=True)
    accumulator.add(1, torch.tensor([2.0]), full=True)

    block = accumulator.take((0, 1))

    assert math.isnan(block[1, 0])
    assert block[2:, 0].tolist() == [2.0, 5.0, 1.0]
    assert block[:, 1].tolist() == [4.0, 2.0, 0.0, 1.0, 0.0]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.3),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "foreach": lambda params: torch.optim.Adam(params, lr=0.1, foreach=True),
    "tensor_rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_pass_over_the_state_of_adam_tells_what_three_do(native_kernels: Any, name: str) -> None:
    params = [nn.Parameter(filled(*shape)) for shape in ((40, 70), (5,), (8, 4, 3, 3), (), (3000,))]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    unused = nn.Parameter(filled(6))
    optimizer = OPTIMIZERS[name]([{"params": params[:2]}, {"params": [*params[2:], unused], "lr": 0.01}])
    for seed in range(3):
        for param in params:
            param.grad = filled(*param.shape, seed=seed).contiguous(memory_format=torch.preserve_format)
        optimizer.step()
    params[1].grad = None  # had gradients before, moved no more
    watched = [params[0], unused, *params[1:]]

    whole = stats.adam_state(optimizer, watched)

    assert whole is not None
    first, second = stats.state_lists(optimizer, watched)
    assert whole.holders == (0, 2, 3, 4, 5)
    assert whole.blocks["parameters"] == pytest.approx(host.measure([param.detach() for param in watched]), rel=1e-6)
    for block, listed in ((whole.blocks["momentum"], first), (whole.blocks["second_moment"], second)):
        kept = [moment for moment in listed if moment is not None]
        assert np.array_equal(block[1:], host.measure(kept)[1:])
    rebuilt = stats.update_norms(optimizer, watched)
    assert rebuilt is not None
    assert whole.updates is not None
    assert whole.updates[0] == rebuilt[0] == (0, 3, 4, 5)
    assert np.asarray(whole.updates[1]) == pytest.approx(np.asarray(rebuilt[1]), rel=1e-6)


@pytest.mark.parametrize("odd", [math.nan, math.inf, 1e38])
def test_a_broken_state_is_told_as_stock_operations_tell_it(native_kernels: Any, odd: float) -> None:
    param = nn.Parameter(filled(5000))
    optimizer = torch.optim.AdamW([param])
    param.grad = filled(5000)
    optimizer.step()
    state = optimizer.state[param]
    state["exp_avg"][7] = odd
    state["exp_avg_sq"][4000] = odd
    param.data[4999] = odd

    whole = stats.adam_state(optimizer, [param])

    assert whole is not None
    assert whole.updates is not None
    for name, tensor in (("parameters", param), ("momentum", state["exp_avg"]), ("second_moment", state["exp_avg_sq"])):
        assert np.array_equal(whole.blocks[name][1:], host.measure([tensor.detach()])[1:], equal_nan=True)
    moment, square = state["exp_avg"].double(), state["exp_avg_sq"].double()
    expected = (moment / 0.1 / ((square / 0.001).sqrt() + 1e-8)).norm().item() * 1e-3
    assert np.asarray(whole.updates[1])[0, 0] == pytest.approx(expected, rel=1e-5, nan_ok=True)


def test_a_state_that_is_not_adams_own_is_left_to_stock_operations(native_kernels: Any) -> None:
    param = nn.Parameter(filled(50))
    optimizer = torch.optim.Adam([param])
    param.grad = filled(50)
    optimizer.step()
    state = optimizer.state[param]
    for name, other in (
        ("exp_avg", state["exp_avg"].double()),
        ("exp_avg", filled(49)),
        ("exp_avg", filled(100)[::2]),
        ("exp_avg_sq", None),
        ("step", "3"),
    ):
        kept, state[name] = state[name], other
        assert stats.adam_state(optimizer, [param]) is None, name
        state[name] = kept
    assert stats.adam_state(optimizer, [param]) is not None
    assert stats.adam_state(torch.optim.SGD([param], lr=0.1), [param]) is None


def test_other_threads_run_while_the_library_reads(native_library: native.Library) -> None:
    """A call that held the GIL would let nobody count."""
    big = torch.ones(20_000_000)
    counting, counted = threading.Event(), [0]

    def count() -> None:
        while not counting.is_set():
            counted[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    before = counted[0]
    for _ in range(10):
        native_library.measure([big])
    during = counted[0] - before
    counting.set()
    thread.join()

    assert during > 1000


def trained(watch: Callable[..., Monitor], kernels: str) -> tuple[list[Tensor], StepReport]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = watch(model, optimizer, kernels=kernels)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        optimizer.step()
    assert monitor.flush()
    assert monitor.report is not None
    assert monitor.snapshot is not None
    assert monitor.snapshot.itself.kernels["cpu"] == kernels
    report = monitor.report
    monitor.close()
    return [parameter.detach() for parameter in model.parameters()], report


def test_both_kernels_report_the_same_steps_and_change_no_weight(
    watch: Callable[..., Monitor], native_kernels: Any
) -> None:
    weights, mine = trained(watch, "native")
    others, theirs = trained(watch, "stock")

    assert all(map(torch.equal, weights, others))
    assert set(mine.layers.columns) == set(theirs.layers.columns)
    for name, (values, observed) in theirs.layers.columns.items():
        assert mine.layers.columns[name][0] == pytest.approx(values, rel=2e-6), name
        assert np.array_equal(mine.layers.columns[name][1], observed), name
