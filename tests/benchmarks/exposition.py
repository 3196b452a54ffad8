"""What it costs to publish a step and to be scraped, at ten thousand series."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from contestants import thread_seconds

from gradexporter.records import Identity, LayerTable, SelfStats, Snapshot, StepReport
from gradexporter.sinks.prometheus import Endpoint
from gradexporter.tally import Tally

SERIES_A_LAYER = 12

_COLUMNS = (
    "gradient_norm",
    "gradient_max_abs",
    "gradient_nonfinite",
    "activation_rms",
    "activation_max_abs",
    "activation_nonfinite",
    "activation_zero_ratio",
    "parameter_norm",
    "update_ratio",
    "momentum_max_abs",
    "second_moment_max_abs",
    "spike_ratio",
)

_CLIENT = """
import sys, urllib.request as r
opener = r.build_opener(r.ProxyHandler({}))
ask = r.Request(sys.argv[1], headers={"Accept-Encoding": "gzip"})
for line in sys.stdin:
    answer = opener.open(ask, timeout=30)
    body = answer.read()
    print(len(body), answer.headers["Content-Encoding"], flush=True)
"""


@dataclass
class Exposition:
    """Costs at so many series."""

    series: int
    publish_us: float
    """CPU time of one step's swap into what is served."""
    scrape_cpu_ms: float
    """CPU time of the endpoint's thread for one compressed scrape in which every value has changed."""
    stall_ms: float
    """Longest pause of a loop in Python during such a scrape."""
    pause_ms: float
    """The same where nothing scrapes: the noise of the machine."""
    kilobytes: float
    """Size of the answer on the wire."""


def measure(series: int = 10_000, repeats: int = 15) -> Exposition:
    """Medians over ``repeats``."""
    layers = max(1, series // SERIES_A_LAYER)
    tally = Tally(Identity(run_id="bench"), clock=time.time)
    reports = [_report(layers, step) for step in range(1, 2 * repeats + 3)]
    tally.add(reports[0], SelfStats())
    publish = []
    for report in reports[1 : repeats + 1]:
        began = time.thread_time()
        tally.add(report, SelfStats())
        publish.append(time.thread_time() - began)
    served = [tally.snapshot]
    endpoint = Endpoint(lambda: served[0], host="127.0.0.1", max_series=2 * series)
    endpoint.start()
    (thread,) = [one for one in threading.enumerate() if one.name == "gradexporter-endpoint"]
    client = subprocess.Popen(
        [sys.executable, "-c", _CLIENT, f"{endpoint.url}/metrics"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert client.stdin is not None
    assert client.stdout is not None
    cpu, stalls, pauses, size = [], [], [], 0
    try:
        for number in range(repeats + 1):
            served[0] = _moved(tally.snapshot, number)
            before = thread_seconds(thread)
            client.stdin.write(b"go\n")
            client.stdin.flush()
            stall = _longest_pause(0.08)
            size, encoding = client.stdout.readline().split()
            assert encoding == b"gzip"
            if number:  # the first scrape makes what is kept from scrape to scrape
                cpu.append(thread_seconds(thread) - before)
                stalls.append(stall)
                pauses.append(_longest_pause(0.08))
    finally:
        client.kill()
        client.wait()
        client.stdin.close()
        client.stdout.close()
        endpoint.close()
    return Exposition(
        series=layers * SERIES_A_LAYER,
        publish_us=median(publish) * 1e6,
        scrape_cpu_ms=median(cpu) * 1e3,
        stall_ms=median(stalls) * 1e3,
        pause_ms=median(pauses) * 1e3,
        kilobytes=int(size) / 1e3,
    )


def _report(layers: int, step: int) -> StepReport:
    random = np.random.default_rng(step)
    seen = np.ones(layers, dtype=bool)
    columns = {name: (random.lognormal(size=layers), seen) for name in _COLUMNS}
    for name in ("gradient_nonfinite", "activation_nonfinite"):
        columns[name] = (np.zeros(layers), seen)
    names = tuple(f"model.layers.{index}.self_attn.q_proj" for index in range(layers))
    return StepReport(step=step, loss=1.0, gradient_norm=1.0, layers=LayerTable(names, columns))


def _moved(snapshot: Snapshot, number: int) -> Snapshot:
    """The snapshot with every value another one."""
    columns = {
        name: (values * (1.001 + number / 1e4), seen) for name, (values, seen) in snapshot.layers.columns.items()
    }
    return dataclasses.replace(snapshot, layers=LayerTable(snapshot.layers.names, columns))


def _longest_pause(seconds: float) -> float:
    longest, last = 0.0, time.perf_counter()
    until = last + seconds
    while last < until:
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    return longest
