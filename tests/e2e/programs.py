"""The programs of the end-to-end test: training runs, Prometheus, Alertmanager, a pager. All on 127.0.0.1."""

from __future__ import annotations

import calendar
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
HOST = "127.0.0.1"
NAMESPACE = "train"

Found = TypeVar("Found")


def until(what: str, condition: Callable[[], Found], seconds: float = 60.0) -> Found:
    """The first true value of ``condition``, which is asked ten times a second; fails when none comes."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain until {what}"
        time.sleep(0.1)
    return found


def moment(text: str) -> float:
    """Unix time of what the programs write in UTC, such as 2026-01-31T12:00:00.123456789Z."""
    fraction = re.match(r"\.\d+", text[19:])
    return calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")) + float(fraction[0] if fraction else 0)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until all are found, so that none comes twice."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind((HOST, 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


class Program:
    """A child process with its output in a file; killed with everything that it started."""

    def __init__(self, command: Sequence[str | Path], log: Path, environment: dict[str, str] | None = None) -> None:
        self._log = log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        """SIGKILL, at once: no handler of the program runs."""
        if self.status is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


# -- training -------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training run: one process a rank, as a launcher starts them."""

    run_id: str
    command: Sequence[str]
    world_size: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    ports: list[int] = field(default_factory=list)
    ranks: list[Program] = field(default_factory=list)

    def start(self, folder: Path) -> None:
        self.ports = free_ports(self.world_size)
        for rank, port in enumerate(self.ports):
            environment = {
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.world_size),
                "GRADEXPORTER_RUN_ID": self.run_id,
                "GRADEXPORTER_HOST": HOST,
                "GRADEXPORTER_PORT": str(port),
                **self.environment,
            }
            command = [sys.executable, *self.command]
            self.ranks.append(Program(command, folder / f"{self.run_id}-{rank}.log", environment))

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

    @property
    def ended(self) -> bool:
        """Every rank has ended by itself, and well."""
        for rank in self.ranks:
            assert rank.status in (None, 0), f"{self.run_id} ended with {rank.status}:\n{rank.output}"
        return all(rank.status == 0 for rank in self.ranks)


# -- the pager ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Notification:
    """What a receiver was sent, and when."""

    lane: str
    receiver: str
    received: float
    """Unix time."""
    payload: dict[str, Any]


class Pager:
    """The webhook of every receiver: ``/LANE/RECEIVER``."""

    def __init__(self) -> None:
        self._notifications: list[Notification] = []
        notifications = self._notifications

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                _, lane, receiver = self.path.split("/")
                notifications.append(Notification(lane, receiver, time.time(), payload))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._server.server_address[1]}"

    def pages(self, lane: str, run_id: str) -> list[Notification]:
        """Pages about a run in the order in which they came; the news that one is over is no page."""
        return [
            each
            for each in list(self._notifications)
            if (each.lane, each.receiver, each.payload["status"]) == (lane, "page", "firing")
            and any(alert["labels"].get("run_id") == run_id for alert in each.payload["alerts"])
        ]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


# -- Prometheus and Alertmanager ------------------------------------------------------------------


class Lane:
    """One Prometheus with the project's rules and one Alertmanager with its configuration."""

    def __init__(
        self, name: str, prometheus: str, alertmanager: str, runs: Sequence[Run], pager: Pager, folder: Path
    ) -> None:
        self.name = name
        self._folder = folder
        port, manager_port = free_ports(2)
        self._url = f"http://{HOST}:{port}"
        self._manager_url = f"http://{HOST}:{manager_port}"
        self._prometheus = Program(
            [
                prometheus,
                f"--config.file={self._prometheus_configuration(runs, manager_port)}",
                f"--storage.tsdb.path={folder / 'prometheus'}",
                f"--web.listen-address={HOST}:{port}",
            ],
            folder / "prometheus.log",
            {"TZ": "UTC"},
        )
        self._alertmanager = Program(
            [
                alertmanager,
                f"--config.file={self._alertmanager_configuration(pager)}",
                f"--storage.path={folder / 'alertmanager'}",
                f"--web.listen-address={HOST}:{manager_port}",
                "--cluster.listen-address=",
            ],
            folder / "alertmanager.log",
            {"TZ": "UTC"},
        )

    def _prometheus_configuration(self, runs: Sequence[Run], manager_port: int) -> Path:
        """Scrapes and evaluates every second; the rules are the project's own file."""
        targets = [f"{HOST}:{port}" for run in runs for port in run.ports]
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(ROOT / "alerts" / "rules.yaml")],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"{HOST}:{manager_port}"]}]}]},
            "scrape_configs": [
                {
                    "job_name": "training",
                    "static_configs": [{"targets": targets, "labels": {"namespace": NAMESPACE}}],
                }
            ],
        }
        file = self._folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(configuration))
        return file

    def _alertmanager_configuration(self, pager: Pager) -> Path:
        """The example as it is, but for the addresses of its receivers."""
        configuration = yaml.safe_load((ROOT / "alerts" / "alertmanager.example.yaml").read_text())
        for receiver in configuration["receivers"]:
            for webhook in receiver.get("webhook_configs", []):
                path = urllib.parse.urlsplit(webhook["url"]).path
                webhook["url"] = f"http://{pager.address}/{self.name}{path}"
        file = self._folder / "alertmanager.yaml"
        file.write_text(yaml.safe_dump(configuration))
        return file

    def wait_until_ready(self) -> None:
        for program, url in ((self._prometheus, self._url), (self._alertmanager, self._manager_url)):
            until(f"{url} is ready", lambda program=program, url=url: self._is_ready(program, url))

    @staticmethod
    def _is_ready(program: Program, url: str) -> bool:
        assert program.status is None, program.output
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        return list(self._get("query", query=expr)["result"])

    def value(self, expr: str) -> float | None:
        """The only sample of an instant query; None if there is none."""
        result = self.query(expr)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def query_range(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of a range query with a point every second."""
        return list(self._get("query_range", query=expr, start=start, end=end, step=1)["result"])

    def alerts(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Pending and firing alerts of a run, by name."""
        alerts = [alert for alert in self._get("alerts")["alerts"] if alert["labels"].get("run_id") == run_id]
        by_name = {alert["labels"]["alertname"]: alert for alert in alerts}
        assert len(by_name) == len(alerts), f"{run_id} has an alert twice: {alerts}"
        return by_name

    def has_evaluated(self, when: float) -> bool:
        """Every rule has been evaluated at or after this Unix time."""
        return all(moment(group["lastEvaluation"]) >= when for group in self._get("rules")["groups"])

    def _get(self, what: str, **parameters: object) -> dict[str, Any]:
        url = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def kill(self) -> None:
        self._prometheus.kill()
        self._alertmanager.kill()
