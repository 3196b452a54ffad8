"""When gradients are reduced over ranks: in the backward, by a wrapper, or after it, by the loop itself."""

from __future__ import annotations

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel


class WhenReduced:
    """Remembers whether a wrapper was seen that reduces in the backward."""

    def __init__(self) -> None:
        self._in_backward = False

    def surveyed(self, model: nn.Module, *, sharded: bool) -> None:
        """Looks for a wrapper in or around ``model`` itself."""
        if sharded or any(isinstance(module, DistributedDataParallel) for module in model.modules()):
            self._in_backward = True

    def entering(self) -> None:
        """Looks for a wrapper around the forward that begins: its module alone may be what is watched."""
        if not self._in_backward:
            self._in_backward = getattr(DistributedDataParallel, "_active_ddp_module", None) is not None

    def follows_backward(self) -> bool:
        """Whether the gradients of several ranks may still be apart when a backward ends."""
        if self._in_backward or not distributed.is_available() or not distributed.is_initialized():
            return False
        return distributed.get_world_size() > 1
