"""Reductions of tensors in main memory by the compiled library: each tensor is read once, a list in one call.

The library gets addresses. Only what certainly is memory of ordinary elements goes there, without gaps; the rest
goes to ``host``. Calls release the GIL.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gradexporter.records import Values
from gradexporter.stats import host
from gradexporter.stats.layout import gapless

CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
"""The dtypes that the library knows, by its own numbers."""

_SUFFIXES = {torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16"}

_ORDINARY_TYPES = frozenset({Tensor, nn.Parameter})
_dtype = operator.attrgetter("dtype")
_is_cpu = operator.attrgetter("is_cpu")
_is_contiguous = Tensor.is_contiguous
_address = Tensor.data_ptr
_numel = Tensor.numel

_LOWEST_ADDRESS = 65536
"""Below it nothing is mapped: the address of a tensor without memory, plus an offset."""

_TOLERANCE = 1e-6
"""Relative difference from ``host`` at which a library is refused."""


class Library:
    """The functions of a loaded library; raises AttributeError if it is another one."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p  # for numbers as well: ctypes converts it in half the time of c_int64
        self._measure = loaded.kernel_measure
        self._adam = loaded.kernel_adam
        self.sentinel = {dtype: loaded[f"kernel_sentinel_{suffix}"] for dtype, suffix in _SUFFIXES.items()}
        self.output = {dtype: loaded[f"kernel_output_{suffix}"] for dtype, suffix in _SUFFIXES.items()}
        arguments = [(self._measure, 6), (self._adam, 7)]
        arguments += [(function, 3) for function in self.sentinel.values()]
        arguments += [(function, 4) for function in self.output.values()]
        for function, count in arguments:
            function.argtypes, function.restype = (pointer,) * count, None

    def measure(self, tensors: Sequence[Tensor], *, norms: bool = True) -> Values | None:
        """As ``host.measure``; None if one of them is not an ordinary tensor in main memory."""
        dtypes = _known_dtypes(tensors)
        if dtypes is None:
            return None
        try:
            addresses = np.array(list(map(_address, tensors)), dtype=np.uint64)
            dense = all(map(_is_contiguous, tensors))
        except (RuntimeError, NotImplementedError):
            return None  # a sparse or opaque layout has no address
        sizes = np.array(list(map(_numel, tensors)), dtype=np.int64)
        block = np.empty((3, len(tensors)))
        others: list[int] = []
        if not dense or addresses.min() < _LOWEST_ADDRESS:
            others = [at for at, tensor in enumerate(tensors) if not (_in_memory(tensor) and gapless(tensor))]
            sizes[others] = 0
        self._measure(*_at(len(tensors), addresses, sizes, dtypes, norms, block))
        if others:
            block[:, others] = host.measure([tensors[at].detach() for at in others], norms=norms)
        return block

    def adam(
        self, states: Sequence[Mapping[str, Any]], group: Mapping[str, Any], params: Sequence[Tensor]
    ) -> Values | None:
        """Parameters, both moments and the update without the rate, in one pass: shape ``(10, len(params))``.

        Rows: three of each as ``measure`` has them (norms of the moments are NaN), and the L2 norm of the update.
        None where the state is not as torch's own Adam keeps it.
        """
        names = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group.get("amsgrad") else [])
        lists: list[Sequence[Any]] = [params, *([state.get(name) for state in states] for name in names)]
        steps = _steps(states)
        rates = [*group["betas"], group["eps"]]
        if steps is None or not all(type(rate) is float for rate in rates):
            return None
        codes = [each for listed in lists if (each := _known_dtypes(listed)) is not None]
        if len(codes) < len(lists) or not all(np.array_equal(each, codes[0]) for each in codes):
            return None
        sizes = list(map(_numel, params))
        try:
            if not all(all(map(_is_contiguous, listed)) for listed in lists) and not _alike(lists):
                return None
            addresses = np.array([list(map(_address, listed)) for listed in lists], dtype=np.uint64)
        except (RuntimeError, NotImplementedError):
            return None
        if addresses.min() < _LOWEST_ADDRESS or any(list(map(_numel, listed)) != sizes for listed in lists[1:]):
            return None
        addresses = addresses[[0, 1, 2, len(lists) - 1]]  # the last is what updates divide by
        block = np.empty((10, len(params)))
        numbers = np.array(sizes, dtype=np.int64)
        self._adam(*_at(len(params), addresses, steps, numbers, codes[0], np.array(rates), block))
        return block


current: Library | None = None
"""The library in use; None while there is none, and where nobody wants one."""


def _at(*arguments: int | NDArray[Any] | None) -> list[Any]:
    return [argument.ctypes.data if isinstance(argument, np.ndarray) else argument for argument in arguments]


def _known_dtypes(tensors: Sequence[Any]) -> NDArray[np.int8] | None:
    """Codes of the dtypes; None if something is not an ordinary tensor in main memory, of a dtype that is known."""
    if not _ORDINARY_TYPES.issuperset(map(type, tensors)) or not all(map(_is_cpu, tensors)):
        return None
    dtypes = set(map(_dtype, tensors))
    if not CODES.keys() >= dtypes:
        return None
    if len(dtypes) == 1:
        return np.full(len(tensors), CODES[dtypes.pop()], dtype=np.int8)
    return np.array([CODES[tensor.dtype] for tensor in tensors], dtype=np.int8)


def _steps(states: Sequence[Mapping[str, Any]]) -> NDArray[np.float64] | None:
    """Updates so far of each parameter; None where they are not numbers in main memory."""
    steps: list[Any] = [state.get("step") for state in states]
    kinds = set(map(type, steps))
    if kinds <= {int, float}:
        return np.array(steps, dtype=np.float64)
    if kinds != {Tensor} or not all(map(_is_cpu, steps)):
        return None
    try:
        stacked = torch.stack(steps)
    except RuntimeError:  # of several dtypes or shapes
        return None
    return stacked.double().numpy() if stacked.dim() == 1 else None


def _alike(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Whether the tensors at each position are without gaps and laid out in the same way."""
    return all(
        gapless(first) and all(other.stride() == first.stride() for other in others)
        for first, *others in zip(*lists, strict=True)
    )


def _in_memory(tensor: Tensor) -> bool:
    """False for a tensor of nothing but zeros that has no memory; raises if its memory was freed."""
    if tensor.data_ptr() >= _LOWEST_ADDRESS:
        return True
    if not tensor._is_zerotensor() and not tensor.untyped_storage().nbytes():
        raise RuntimeError("the memory of a tensor has been freed")
    return False


class Accumulator(host.Accumulator):
    """As ``host.Accumulator``, by the library from the moment that there is one."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self._block = np.zeros((5, layers))
        start, size = self._block.ctypes.data, self._block.itemsize
        self._columns = [start + size * layer for layer in range(layers)]
        self._counts = [start + size * (4 * layers + layer) for layer in range(layers)]
        self._row = layers
        self._used = False
        self._indexes: dict[tuple[int, ...], NDArray[np.intp]] = {}

    def add(self, layer: int, tensor: Tensor, *, full: bool) -> None:
        """Adds one output tensor; a plain sentinel when not ``full``."""
        library = current
        if library is not None and tensor.dtype in CODES and gapless(tensor):
            address = tensor.data_ptr()
            if address >= _LOWEST_ADDRESS:
                self._used = True
                if full:
                    library.output[tensor.dtype](address, tensor.numel(), self._columns[layer], self._row)
                else:
                    library.sentinel[tensor.dtype](address, tensor.numel(), self._counts[layer])
                return
        super().add(layer, tensor, full=full)

    def take(self, layers: Sequence[int]) -> Values:
        """The columns of these layers, which start again from zero."""
        block = super().take(layers)
        if self._used:
            key = tuple(layers)
            index = self._indexes.get(key)
            if index is None:
                index = self._indexes[key] = np.array(key, dtype=np.intp)
            mine = self._block[:, index]
            self._block[:, index] = 0.0
            largest = np.maximum(block[1], mine[1])  # a NaN of either goes through
            block += mine
            block[1] = largest
        return block


def check(library: Library) -> None:
    """Raises RuntimeError unless the library agrees with ``host``; no random state of the user's is touched."""
    ramp = torch.arange(-2100, 2500, dtype=torch.float64, device="cpu")
    whole = ramp * 0.37
    cases = [whole, whole[:1], whole * 0, whole * 1e-30, whole[3:70], whole.abs().sqrt(), whole.clone()]
    cases[-1][::97], cases[-1][5] = torch.inf, torch.nan
    for dtype in CODES:
        tensors = [case.to(dtype) for case in cases] + [(whole * 1e-4).to(dtype)[1:].reshape(3, -1).t()]
        mine, theirs = library.measure(tensors), host.measure(tensors)
        if mine is None or not _agree(mine[:1], theirs[:1]) or not np.array_equal(mine[1:], theirs[1:], equal_nan=True):
            raise RuntimeError(f"gradients in {dtype} are not those of torch")
        block, odd = np.zeros((5, 1)), np.zeros(1)
        expected = host.Accumulator(1)
        for tensor in tensors:
            start = block.ctypes.data
            library.output[dtype](tensor.data_ptr(), tensor.numel(), start, 1)
            library.sentinel[dtype](tensor.data_ptr(), tensor.numel(), odd.ctypes.data)
            expected.add(0, tensor, full=True)
        theirs = expected.take((0,))
        counts = np.array_equal(block[1:], theirs[1:], equal_nan=True) and odd[0] == theirs[4, 0]
        if not counts or not _agree(block[:1], theirs[:1]):
            raise RuntimeError(f"outputs in {dtype} are not those of torch")
    for dtype in (torch.float32, torch.float64):
        parts = [whole.to(dtype), (whole * 1e-3).to(dtype), (whole * whole * 1e-6).to(dtype)]
        state = {"exp_avg": parts[1], "exp_avg_sq": parts[2], "step": torch.tensor(3.0, device="cpu")}
        group = {"betas": (0.9, 0.999), "eps": 1e-8}
        mine = library.adam([state], group, parts[:1])
        theirs = np.concatenate([*(host.measure([part]) for part in parts), host.adam_norms([state], group)[None]])
        if mine is None or not _agree(mine[[0, 1, 2, 4, 5, 7, 8, 9]], theirs[[0, 1, 2, 4, 5, 7, 8, 9]]):
            raise RuntimeError(f"optimizer state in {dtype} is not that of torch")


def _agree(mine: Values, theirs: Values) -> bool:
    return bool(np.allclose(mine, theirs, rtol=_TOLERANCE, atol=0.0, equal_nan=True))
