"""Nothing between the hooks of a step waits for a device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradexporter.monitor import Monitor

PACKAGE = Path(__file__).resolve().parent.parent / "gradexporter"

FILES = sorted(
    file
    for room in ("clip.py", "hooks/*.py", "stats/*.py")
    for file in PACKAGE.glob(room)
    if file.relative_to(PACKAGE).as_posix() not in ("stats/host.py", "stats/native.py")  # main memory alone
)

READING_METHODS = frozenset(
    {"item", "cpu", "tolist", "numpy", "nonzero", "masked_select", "is_nonzero", "synchronize", "asarray"}
    | {"__bool__", "__float__", "__int__"}
)
"""Methods that bring a tensor's value to the host."""

READING_FUNCTIONS = frozenset({"float", "int", "bool"})
"""They do so too when they are given a tensor, which the text cannot tell: each use says why it is none."""

ANSWERS = frozenset(
    {"any", "all", "isnan", "isinf", "isfinite", "equal", "allclose", "eq", "gt", "lt", "count_nonzero", "norm"}
    | {"max", "min", "amax", "amin", "sum", "mean", "prod"}
)
"""Methods and torch functions whose result is a tensor that must not decide anything."""

HOST_ONLY: dict[str, str] = {
    "total.item()": "in main memory: gradients elsewhere are torch's to clip",
    "math.isfinite(total.item())": "the same",
    "torch.equal(total, expected)": "the same",
    "norms.numpy()": "the same",
    "np.asarray(norms.numpy(), dtype=np.float64)": "the same",
    "bool(foreach)": "a flag",
    "float(max_norm)": "a number, as in torch's own clip",
    "bool(self.parameters)": "a list",
    "bool(held)": "a set of identities",
    "bool(kwargs.get('closure') or len(args) > 1)": "a callable",
    "bool(watched.rates)": "a list",
    "bool(_listeners)": "a set of listeners",
    "float(rate)": "a number: tensors went the other way",
    "bool((pending.order >= 0).any())": "a numpy array",
    "bool(overflow)": "a number: tensors went the other way",
    "float(bool(overflow))": "the same",
    "float(norm)": "a number that the engine has brought to the host already",
    "float(scale)": "a number that the engine keeps on the host",
    "bool(handle.uses_sharded_strategy)": "a flag",
    "bool(self._watched)": "a list",
    "bool(self._versions)": "a list of numbers",
    "np.flatnonzero(norms < _SMALLEST_NORM).tolist()": "a numpy array",
    "norms.min()": "a numpy array",
    "self.plan.owners.tolist()": "a numpy array",
    "float(joined[1].max())": "a numpy array: tensors went the other way",
    "float(joined[2].sum())": "the same",
    "bool(self._hidden)": "a list",
    "bool(late)": "a list",
    "bool(frames.input_codes.seen)": "a list of code objects",
    "bool(entries(code))": "what dynamo keeps of a code object",
    "int(row)": "a row of integers is a key in main memory; rows on a device are floating",
    "order.tolist()": "a numpy array",
}
"""Expressions that read a value which is on the host already, and what it is."""


def readings(file: Path) -> Iterator[str]:
    """Every expression that may wait for a device."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and _reads(node):
            yield ast.unparse(node)
        for test in _tests(node):
            yield from (ast.unparse(part) for part in _parts(test) if _answers(part))


def _tests(node: ast.AST) -> list[ast.expr]:
    """Expressions whose truth decides something."""
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.comprehension):
        return node.ifs
    return [node] if isinstance(node, (ast.BoolOp, ast.UnaryOp)) else []


def _reads(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Attribute):
        to_host = call.func.attr == "to" and any(ast.unparse(argument) == "'cpu'" for argument in call.args)
        return to_host or call.func.attr in READING_METHODS
    named = isinstance(call.func, ast.Name) and call.func.id in READING_FUNCTIONS
    return named and not all(isinstance(argument, ast.Constant) for argument in call.args)


def _parts(test: ast.expr) -> Iterator[ast.expr]:
    """What a condition is made of."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _parts(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _parts(test.operand) if isinstance(test.op, ast.Not) else ()
    elif isinstance(test, ast.NamedExpr):
        yield from _parts(test.value)
    elif isinstance(test, ast.Compare):
        yield from (test.left, *test.comparators)
    else:
        yield test


def _answers(part: ast.expr) -> bool:
    return isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in ANSWERS


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_expression_asks_a_tensor_for_its_value(file: Path) -> None:
    """A line that must, because its value is on the host already, says so in ``HOST_ONLY``."""
    assert not set(readings(file)) - HOST_ONLY.keys()


def test_every_exception_is_still_there() -> None:
    assert {reading for file in FILES for reading in readings(file)} >= HOST_ONLY.keys()


@pytest.mark.parametrize(
    "code",
    [
        "x.item()",
        "float(x)",
        "x.cpu()",
        "x.to('cpu')",
        "numpy.asarray(x)",
        "torch.cuda.synchronize()",
        "torch.masked_select(x, m)",
        "if x.isnan().any(): pass",
        "if x.max() > 3: pass",
        "while x.sum(): pass",
        "assert x.sum() == 0",
        "y = 1 if not x.any() else 2",
        "y = x.any() or z",
        "if (y := x.any()): pass",
        "y = [part for part in x if part.isnan().any()]",
        "int(x.sum())",
    ],
)
def test_the_check_sees_a_synchronisation(code: str, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(code)

    assert list(readings(tmp_path / "bad.py"))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernels", ["stock", "native"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_step_on_a_device_waits_for_it(watch: Callable[..., Monitor], name: str, scaled: bool, kernels: str) -> None:
    """With the first step, which compiles and sends tables, and the sampled ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10)).cuda()
    optimizer = OPTIMIZERS[name](model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    x, y = torch.randn(32, 64, device="cuda"), torch.randint(10, (32,), device="cuda")

    def backward() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", enabled=scaled):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        return loss

    def update() -> None:
        scaler.step(optimizer)  # with a scaler and without fused kernels torch itself waits, for found_inf
        scaler.update()

    def clip() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for _ in range(3):  # what torch and the optimizer do once
        backward(), clip(), update()
    monitor = watch(model, optimizer, activation_every=2, state_every=2, kernels=kernels)
    strict = not scaled or name.endswith("fused")
    for _ in range(5):
        torch.cuda.set_sync_debug_mode("error")
        try:
            monitor.observe(backward(), x, y)
            clip()
            if not strict:
                torch.cuda.set_sync_debug_mode("default")
            update()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert monitor.flush()
    assert monitor.report is not None
    assert monitor.report.step == 5
    assert monitor.report.gradient_norm
