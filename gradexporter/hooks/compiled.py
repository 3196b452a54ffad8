"""Outputs of layers inside regions of ``torch.compile``.

A hook that dynamo traces leaves calls of an opaque operation in the graph. What differs between layers is
carried by a tensor, for a constant would make blocks that share compiled code compile each on its own; and
every call takes in the clock that the call before it gave out, so that no compiler drops, repeats or reorders
them.

On the host the operation hands the output to the same code as an eager forward. On an accelerator, where a
CUDA graph replays it without Python, it adds the statistics to a row that lies there.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, library, nn

from gradexporter import stats

Function = TypeVar("Function", bound=Callable[..., Any])


class Point(Protocol):
    """A hook that compiled code calls; does not raise."""

    def arrived(self, output: Tensor) -> None:
        """The module has returned ``output``, on the host."""


class LayerPoint(Point, Protocol):
    """A hook whose outputs may lie on an accelerator."""

    def launched(self, recording: bool) -> bool | None:
        """The module is about to be measured there: whether in full; None for not at all.

        While a graph is ``recording`` nothing may be started on the device that is not to be replayed.
        """


class Mark:
    """What tells the operation which hook it is called for: two tensors that compiled code takes as inputs."""

    __slots__ = ("clock", "row")

    def __init__(self, point: Point, place: torch.device) -> None:
        self.clock = _clock(place)
        if place.type == "cpu":
            number = next(_numbers)
            self.row = torch.tensor([number])
            _points[number] = point
        else:
            self.row = stats.device.new_row(place)
            _points[-self.row.data_ptr()] = point
        _fix(self.row)

    @property
    def adds_up(self) -> bool:
        """Whether the row holds sums of what was measured."""
        return self.row.is_floating_point()


in_use: set[torch.device] = set()
"""Accelerators on which compiled code has measured something."""

_numbers = itertools.count()
_points: weakref.WeakValueDictionary[int, Point] = weakref.WeakValueDictionary()
"""Hooks by the number in their row on the host, or else by the negative address of their row."""


def mark(point: Point, place: torch.device) -> Mark | None:
    """The mark of a hook on a module that computes on ``place``; None where compiled code is not looked into."""
    return Mark(point, place) if _operations is not None and place.type in ("cpu", "cuda") else None


@functools.cache
def _clock(place: torch.device) -> Tensor:
    clock = torch.zeros(1, dtype=torch.float64, device=place)  # of 0 dims it would be a Python number to dynamo
    _fix(clock)
    return clock


def _fix(tensor: Tensor) -> None:
    """What ``mark_static_address`` and ``mark_static`` of dynamo do, without importing it.

    A CUDA graph would copy the tensor before each replay otherwise, or be skipped because it is written to.
    """
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    tensor._dynamo_static_indices = set(range(tensor.ndim))  # type: ignore[attr-defined]


def untraced(function: Function) -> Function:
    """Has dynamo run ``function``, and what it calls, as it stands, where it would compile it as a frame of its own.

    Inside a frame that is being traced it changes nothing.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "_FrameExecStrategy"):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def hidden(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Keeps code that was compiled for others from being used for ``modules``, whose hooks it would pass over.

    Such code was made before there were hooks, or for a module of the same class that has none, such as a copy. Dynamo
    guards the type of the dict that holds a module's parameters, and here gets another one than usual. Returns what
    ``shown`` undoes: nothing where compiling once more might stop the run.
    """
    if there() and not _may_compile():
        return []
    changed = [module for module in modules if type(module._parameters) is dict]
    for module in changed:
        module.__dict__["_parameters"] = OrderedDict(module._parameters)
    return changed


def shown(modules: Iterable[nn.Module]) -> None:
    """Undoes ``hidden``; what was compiled without hooks fits again."""
    for module in modules:
        if type(module._parameters) is OrderedDict:
            module.__dict__["_parameters"] = dict(module._parameters)


def there() -> bool:
    """Whether dynamo has compiled anything in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and bool(frames.input_codes.seen)


def has_code(module: nn.Module) -> bool:
    """Whether dynamo has compiled the forward of such modules."""
    code = getattr(type(module).forward, "__code__", None)
    entries = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
    return code is not None and entries is not None and bool(entries(code))


def _may_compile() -> bool:
    """Whether one more compilation neither raises nor makes dynamo give up on a function."""
    dynamo = sys.modules["torch._dynamo"]
    frames = sys.modules["torch._dynamo.convert_frame"]
    try:
        if dynamo.eval_frame._stance.stance != "default" or dynamo.config.error_on_recompile:
            return False
        most = dynamo.config.recompile_limit - 1
        entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list
        codes = [code for reference in list(frames.input_codes.seen) if (code := reference()) is not None]
        return all(len(entries(code)) < most for code in codes)
    except AttributeError:  # another version of torch
        return False


def regions(model: nn.Module) -> list[nn.Module]:
    """The outermost modules of ``model`` that were handed to ``torch.compile``."""
    found: list[nn.Module] = []
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if type(module).__name__ == "OptimizedModule":
            found.append(cast(nn.Module, module._orig_mod))
        elif getattr(module, "_compiled_call_impl", None) is not None:
            found.append(module)
        else:
            waiting += module.children()
    return found


# -- while dynamo traces ------------------------------------------------------------------------------


def trace(mark: Mark | None, output: Any) -> None:
    """Leaves the measurement of a module's ``output`` in the graph that dynamo is tracing; else does nothing."""
    if mark is not None and torch.is_grad_enabled() and _in_graph():
        _trace(mark, output)


def announce(mark: Mark | None) -> None:
    """Leaves in the graph that dynamo is tracing that its hook was called; else does nothing."""
    if mark is not None and _in_graph():
        _emit(mark, mark.clock)


def trace_each(mark: Mark | None, values: Iterable[Any]) -> None:
    """``trace`` for those ``values`` that are tensors."""
    for value in values:
        if isinstance(value, Tensor):
            trace(mark, value)


def _in_graph() -> bool:
    """Whether an operation of ours may go into what dynamo is tracing; dynamo calls it, and keeps the answer.

    Not into an exported program, into the inner graph of a transform of functorch, or into that of an operation
    that lets nothing inside be written to (a branch of ``torch.cond``, the body of a loop).
    """
    symbolic = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        if symbolic is None or torch.compiler.is_exporting() or torch._C._are_functorch_transforms_active():
            return False
        tracer = symbolic.InstructionTranslator.current_tx().output.current_tracer
        while tracer.parent is not None:
            if str(tracer.source_target) not in _PENETRABLE:
                return False
            tracer = tracer.parent
        return True
    except Exception:  # another version of torch, or nothing of dynamo's
        return False


def fuses() -> bool:
    """Whether what dynamo is tracing goes to a compiler that fuses operations; dynamo calls it, and keeps the answer.

    An output that only exists because it is measured would round otherwise than one that was fused into what follows.
    """
    symbolic = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        assert symbolic is not None
        backend = symbolic.InstructionTranslator.current_tx().output.compiler_fn
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        return getattr(backend, "compiler_name", getattr(backend, "__name__", "")) not in _NOT_FUSING
    except Exception:  # another version of torch
        return True


fuses._dynamo_marked_constant = True  # type: ignore[attr-defined]

_NOT_FUSING = frozenset({"eager", "eager_noexcept", "aot_eager", "aot_eager_decomp_partition", "cudagraphs"})
"""Backends that run the operations one by one."""

_KERNELS = frozenset(
    layer.forward for layer in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d)
)
"""Forwards that end in a kernel of their own, so that what they return exists in any case."""


def keeps_output(module: nn.Module) -> bool:
    """Whether the output of a module exists as a tensor in fused code as well, and may be measured there."""
    weight = module._parameters.get("weight")  # of a parametrization the attribute would be computed, and change it
    # A matrix product over one element, or with one column, becomes a multiplication and may be fused.
    return type(module).forward in _KERNELS and isinstance(weight, Tensor) and min(weight.shape[:2]) > 1


_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler.assume_constant_result

_PENETRABLE = frozenset({"wrap_activation_checkpoint", "tag_activation_checkpoint"})
"""Operations with an inner graph that is computed once and in its place."""


def _trace(mark: Mark, output: Any) -> None:
    if isinstance(output, Tensor):
        _trace_tensor(mark, output)
    elif isinstance(output, (tuple, list)):
        for part in output:
            _trace(mark, part)
    elif isinstance(output, dict):
        for part in output.values():
            _trace(mark, part)
    elif dataclasses.is_dataclass(output):
        for field in dataclasses.fields(output):
            _trace(mark, getattr(output, field.name, None))


def _trace_tensor(mark: Mark, output: Tensor) -> None:
    if type(output) is not Tensor and type(output) is not nn.Parameter:
        if not hasattr(output, "to_local"):
            return
        output = output.to_local()
    if output.is_nested or output.layout is not torch.strided or output.device != mark.row.device:
        return
    if output.is_floating_point() or output.is_complex():
        _emit(mark, output.detach())


def _emit(mark: Mark, output: Tensor) -> None:
    if not mark.row.is_floating_point():
        mark.clock.copy_(torch.ops.gradexporter.seen(mark.clock, mark.row, output))
    else:
        row, clock = torch.ops.gradexporter.added(mark.row, mark.clock, output)
        mark.row.copy_(row)
        mark.clock.copy_(clock)


# -- while compiled code runs -------------------------------------------------------------------------


def _seen(clock: Tensor, row: Tensor, output: Tensor) -> Tensor:
    point = _points.get(int(row))
    if point is not None:
        point.arrived(output)
    return clock.clone()


def _added(row: Tensor, clock: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    # A backend that does not update its inputs in place comes with a copy of the row: measured at every call.
    in_use.add(row.device)
    point = cast(LayerPoint | None, _points.get(-row.data_ptr()))
    full = True if point is None else point.launched(row.is_cuda and torch.cuda.is_current_stream_capturing())
    if full is None:
        return row.clone(), clock.clone()
    return stats.device.added(row, clock, stats.plain(output), full=full)


def _define() -> Any:
    if not hasattr(torch.compiler, "is_exporting"):
        return None  # torch 2.6: our operation would end up in exported programs
    operations: Any = library.Library("gradexporter", "FRAGMENT")  # type: ignore[no-untyped-call]
    tags = (torch.Tag.pt2_compliant_tag,)
    operations.define("seen(Tensor clock, Tensor row, Tensor output) -> Tensor", tags=tags)
    operations.define("added(Tensor row, Tensor clock, Tensor output) -> (Tensor, Tensor)", tags=tags)
    operations.impl("seen", _seen, "CPU")
    operations.impl("seen", lambda clock, row, output: torch.empty_like(clock), "Meta")
    operations.impl("added", _added, "CUDA")
    operations.impl("added", lambda row, clock, output: (torch.empty_like(row), torch.empty_like(clock)), "Meta")
    return operations


_operations = _define()
