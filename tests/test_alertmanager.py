"""The Alertmanager example in a real Alertmanager: who is told, and what is muted by what."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from gradexporter.bundle.rules import alerts
from gradexporter.config import AlertConfig
from gradexporter.records import Severity

EXAMPLE = ROOT / "alerts" / "alertmanager.example.yaml"
ALERTS = {alert.name: alert for alert in alerts(AlertConfig())}

lanes = pytest.mark.parametrize("lane", [None, "new"], ids=["system", "new"])


@lanes
def test_the_example_is_a_valid_configuration(tool, lane):
    result = subprocess.run([tool("amtool", lane=lane), "check-config", str(EXAMPLE)], capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr


@lanes
@pytest.mark.parametrize("alert", [*ALERTS, "KubePodCrashLooping"])
def test_an_alert_goes_where_its_severity_says(tool, lane, alert):
    severity = ALERTS[alert].severity if alert in ALERTS else Severity.CRITICAL
    receiver = {Severity.CRITICAL: "gradexporter-pager", Severity.WARNING: "gradexporter-tickets"}[severity]
    command = [tool("amtool", lane=lane), "config", "routes", "test", f"--config.file={EXAMPLE}"]
    labels = [f"alertname={alert}", f"severity={severity}", "namespace=ml", "run_id=run-a"]

    result = subprocess.run([*command, *labels], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == (receiver if alert in ALERTS else "default")


def test_a_page_waits_for_nothing_and_for_no_other_alert():
    """Grouped without alertname, the non-finite page would wait for the group of the cascade page."""
    [pages, tickets] = yaml.safe_load(EXAMPLE.read_text())["route"]["routes"]

    assert pages["group_by"] == ["namespace", "run_id", "alertname"]
    assert pages["group_wait"] == "0s"
    assert tickets["group_by"] == ["namespace", "run_id"]


def test_only_a_page_mutes_a_page():
    for rule in yaml.safe_load(EXAMPLE.read_text())["inhibit_rules"]:
        [source, severity] = rule["source_matchers"]

        assert ALERTS[source.split('"')[1]].severity is Severity.CRITICAL
        assert severity == 'severity="critical"'
        assert rule["equal"] == ["namespace", "run_id"]


def test_every_alert_that_is_named_exists():
    for rule in yaml.safe_load(EXAMPLE.read_text())["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            label, _, value = matcher.replace("=~", "=").partition("=")
            if label == "alertname":
                assert set(value.strip('"').split("|")) <= set(ALERTS)


# -- a real one -----------------------------------------------------------------------------------


class Alertmanager:
    """One running program, asked over its API."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}/api/v2"
        address = self._url.removeprefix("http://").removesuffix("/api/v2")
        flags = [f"--config.file={EXAMPLE}", f"--storage.path={folder}", f"--web.listen-address={address}"]
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen([program, *flags, "--cluster.listen-address="], stderr=self._log)

    def until(self, what: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Waits until ``what`` returns something true."""
        end = time.monotonic() + seconds
        while True:
            try:
                found = what()
            except (urllib.error.URLError, ConnectionError):
                found = None
            if found or time.monotonic() > end:
                return found
            time.sleep(0.02)

    def post(self, *names: str, **labels: str) -> None:
        """Fires these alerts of one run."""
        fired = [
            {"labels": {"alertname": name, "severity": str(ALERTS[name].severity), **labels}, "annotations": {}}
            for name in names
        ]
        request = urllib.request.Request(
            f"{self._url}/alerts", json.dumps(fired).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=5).close()

    def loud(self, run: str) -> set[str]:
        """Alerts of a run that are not muted."""
        return {
            alert["labels"]["alertname"]
            for alert in self.get("alerts")
            if alert["labels"]["run_id"] == run and alert["status"]["state"] == "active"
        }

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self._url}/{path}", timeout=5) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=10)
        self._log.close()


@pytest.fixture(scope="module", params=[None, "new"], ids=["system", "new"])
def alertmanager(
    request: pytest.FixtureRequest, tool: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Alertmanager]:
    running = Alertmanager(tool("prometheus-alertmanager", lane=request.param), tmp_path_factory.mktemp("alertmanager"))
    try:
        assert running.until(lambda: running.get("status")), "Alertmanager did not start"
        yield running
    finally:
        running.close()


NONFINITE, CASCADE, DIED = "GradexporterNonfinite", "GradexporterGradientCascade", "GradexporterDiedWhileUnhealthy"
WARNINGS = [name for name, alert in ALERTS.items() if alert.severity is Severity.WARNING]


@pytest.mark.parametrize(
    ("fired", "loud"),
    [
        ([NONFINITE, CASCADE, DIED, *WARNINGS], NONFINITE),
        ([CASCADE, DIED, *WARNINGS], CASCADE),
        ([DIED, *WARNINGS], DIED),
        ([NONFINITE, DIED], NONFINITE),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else value,
)
def test_one_page_is_open_whatever_fires(alertmanager, fired, loud):
    run = "-".join(fired)
    alertmanager.post(*fired, namespace="ml", run_id=run, attempt="0")

    assert alertmanager.until(lambda: alertmanager.loud(run) == {loud}), alertmanager.loud(run)


def test_a_run_does_not_mute_another(alertmanager):
    """Nor does the same run id in another namespace."""
    alertmanager.post(NONFINITE, namespace="ml", run_id="lost", attempt="0")
    alertmanager.post(CASCADE, namespace="ml", run_id="other", attempt="0")
    alertmanager.post(CASCADE, namespace="elsewhere", run_id="lost", attempt="0")

    assert alertmanager.until(lambda: alertmanager.loud("lost") == {NONFINITE, CASCADE})
    assert alertmanager.loud("other") == {CASCADE}


def test_a_restart_is_in_the_incident_of_its_run(alertmanager):
    """A non-finite second attempt mutes what is still open of the first."""
    alertmanager.post(CASCADE, namespace="ml", run_id="again", attempt="0")
    alertmanager.post(NONFINITE, namespace="ml", run_id="again", attempt="1")

    assert alertmanager.until(lambda: alertmanager.loud("again") == {NONFINITE})


def test_outside_kubernetes_runs_have_no_namespace_and_still_mute(alertmanager):
    alertmanager.post(NONFINITE, CASCADE, run_id="bare", attempt="0")

    assert alertmanager.until(lambda: alertmanager.loud("bare") == {NONFINITE})
