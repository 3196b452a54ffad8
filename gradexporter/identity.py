"""Who this process is, from what its launcher put into the environment."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping
from typing import Any

from gradexporter.config import Config
from gradexporter.records import Identity


def identify(config: Config, model: str, optimizer: str, environ: Mapping[str, str] | None = None) -> Identity:
    """The identity of this rank.

    ``run_id``: setting, the job's uid by the downward API (``GRADEXPORTER_JOB_UID``), ``TORCHELASTIC_RUN_ID``
    unless it is torchrun's default "none", ``SLURM_JOB_ID``, else a random one that the ranks of a process
    group share.
    """
    environ = os.environ if environ is None else environ
    return Identity(
        run_id=config.run_id or _launched_run_id(environ) or _random_run_id(),
        rank=_number(environ, "RANK", "SLURM_PROCID"),
        local_rank=_number(environ, "LOCAL_RANK", "SLURM_LOCALID"),
        world_size=_number(environ, "WORLD_SIZE", "SLURM_NTASKS", otherwise=1),
        attempt=config.attempt or str(_number(environ, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")),
        paging=config.paging,
        labels=dict(config.labels),
        model=model,
        optimizer=optimizer,
    )


def local_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Ranks on this host, 1 when no launcher says."""
    return _number(os.environ if environ is None else environ, "LOCAL_WORLD_SIZE", otherwise=1)


def local_rank(environ: Mapping[str, str] | None = None) -> int:
    """This process among the ranks of its host, 0 when no launcher says."""
    return _number(os.environ if environ is None else environ, "LOCAL_RANK", "SLURM_LOCALID")


def _launched_run_id(environ: Mapping[str, str]) -> str | None:
    for variable in ("GRADEXPORTER_JOB_UID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        value = environ.get(variable, "").strip()
        if value and not (variable == "TORCHELASTIC_RUN_ID" and value == "none"):
            return value
    return None


def _random_run_id() -> str:
    own = uuid.uuid4().hex[:12]
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return own
    try:
        store = distributed.distributed_c10d._get_default_store()
        # One atomic exchange: the first rank's id stands and no rank waits for another.
        shared: bytes = store.compare_set("gradexporter/run_id", "", own)
        return shared.decode() or own
    except Exception:  # a store without compare_set: each rank has an id of its own
        return own


def _number(environ: Mapping[str, str], *variables: str, otherwise: int = 0) -> int:
    for variable in variables:
        text = environ.get(variable, "").strip()
        if text.isascii() and text.isdigit() and len(text) < 10:  # a rank, not a number of some other kind
            return int(text)
    return otherwise
