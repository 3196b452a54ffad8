"""What stands around every entry point of a capture: no fault of ours, and no operation, reaches the user."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes

from gradexporter.hooks.batch import valueless

if TYPE_CHECKING:
    from gradexporter.hooks.capture import Capture

Method = TypeVar("Method", bound=Callable[..., None])


def quietly(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Calls out of sight of the user's dispatch modes: selective checkpointing, a counter of operations."""
    if torch._C._len_torch_dispatch_stack():
        with _disable_current_modes():
            function(*args, **kwargs)
    else:
        function(*args, **kwargs)


def fenced(method: Method) -> Method:
    """Counts a fault of ours instead of raising it, and the time that we took."""

    @functools.wraps(method)
    def guarded(self: Capture, *args: Any, **kwargs: Any) -> None:
        if not self.alive or valueless():
            return
        began = time.perf_counter()
        try:
            quietly(method, self, *args, **kwargs)
        except Exception as error:
            self.fence.record("hooks", error)
        finally:
            self.seconds += time.perf_counter() - began

    return cast(Method, guarded)
