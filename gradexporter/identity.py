"""Who this process is, from its process group and from what its launcher put into the environment."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import uuid
from collections.abc import Mapping
from typing import Any

from gradexporter.config import Config
from gradexporter.records import Identity

STORE_SECONDS = 5.0
"""How long a store may take to say the run id that the ranks share; watching or judging waits for it."""

_log = logging.getLogger("gradexporter")


def identify(config: Config, model: str, optimizer: str, environ: Mapping[str, str] | None = None) -> Identity:
    """The identity of this process as its launcher gave it.

    ``run_id``: setting, the job's uid by the downward API (``GRADEXPORTER_JOB_UID``), ``TORCHELASTIC_RUN_ID``
    unless it is torchrun's default "none", ``SLURM_JOB_ID``, else a random one.
    """
    environ = os.environ if environ is None else environ
    return Identity(
        run_id=config.run_id or _launched_run_id(environ) or uuid.uuid4().hex[:12],
        rank=_number(environ, "RANK", "SLURM_PROCID"),
        local_rank=_number(environ, "LOCAL_RANK", "SLURM_LOCALID"),
        world_size=_number(environ, "WORLD_SIZE", "SLURM_NTASKS", otherwise=1),
        attempt=config.attempt or str(_number(environ, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")),
        paging=config.paging,
        labels=dict(config.labels),
        model=model,
        optimizer=optimizer,
    )


def in_group(own: Identity, config: Config, environ: Mapping[str, str] | None = None) -> Identity:
    """This identity as a member of the process group; ``own`` itself while there is none.

    Rank and world size are the group's, whatever the launcher said, and a random ``run_id`` becomes one that all
    ranks share. Takes no longer than ``STORE_SECONDS``, and waits for no other rank.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return own
    named = config.run_id or _launched_run_id(os.environ if environ is None else environ)
    return dataclasses.replace(
        own,
        run_id=named or _shared(own.run_id, distributed),
        rank=distributed.get_rank(),
        world_size=distributed.get_world_size(),
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


def _shared(run_id: str, distributed: Any) -> str:
    """The run id that the first rank put into the process group's store."""
    answers: list[str] = []
    faults: list[str] = []

    def exchange() -> None:
        try:
            store = distributed.distributed_c10d._get_default_store()
            # One atomic exchange: the first rank's id stands and no rank waits for another.
            answers.append(store.compare_set("gradexporter/run_id", "", run_id).decode() or run_id)
        except Exception as error:  # a backend without a store, a store whose host is gone
            faults.append(f"{type(error).__name__}: {error}")

    # On a thread: nothing bounds how long the client of a store waits for a host that hangs.
    asking = threading.Thread(target=exchange, name="gradexporter-run-id", daemon=True)
    asking.start()
    asking.join(STORE_SECONDS)
    if answers:
        return answers[0]
    _log.warning(
        "gradexporter: the ranks share no run_id, since the process group's store gave none (%s); "
        "this rank goes by %s: set run_id or GRADEXPORTER_RUN_ID",
        faults[0] if faults else f"no answer within {STORE_SECONDS:g} s",
        run_id,
    )
    return run_id


def _number(environ: Mapping[str, str], *variables: str, otherwise: int = 0) -> int:
    for variable in variables:
        text = environ.get(variable, "").strip()
        if text.isascii() and text.isdigit() and len(text) < 10:  # a rank, not a number of some other kind
            return int(text)
    return otherwise
