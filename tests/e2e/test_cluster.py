"""Training runs, scraped by a real Prometheus with our rules, paged about by a real Alertmanager with our routes.

All runs and both releases of the two programs live at the same time: a story is told once and read by every test.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import NAMESPACE, ROOT, Lane, Notification, Pager, Run, moment, until

from gradexporter.bundle.rules import alerts
from gradexporter.config import AlertConfig
from gradexporter.records import State

LANES = {"base": None, "new": "new"}
"""The release of the machine, and a newer one."""

PACE = "0.3"
"""Seconds a step: the demo is in a cascade for eleven steps, which is three scrapes."""

GROUP_INTERVAL = 10
"""Of the pager's route: when a second notification of a group would come."""

HELD = ("--hold", "600", "--json")

DYING = Run(run_id="dying", command=["-m", "gradexporter", "demo", "--step-seconds", PACE, *HELD], world_size=4)
KILLED = Run(run_id="killed", command=["-m", "gradexporter", "demo", "--step-seconds", PACE, *HELD], world_size=2)
EXPERIMENT = Run(
    run_id="experiment",
    command=["-m", "gradexporter", "demo", "--step-seconds", PACE, *HELD],
    environment={"GRADEXPORTER_PAGING": "0"},
)
HEALTHY = Run(
    run_id="healthy",
    command=["-m", "gradexporter", "demo", "--scenario", "healthy", "--step-seconds", "0.1", "--hold", "4", "--json"],
)
BENIGN = Run(run_id="benign", command=[str(Path(__file__).parent / "benign_run.py")])
RUNS = (DYING, KILLED, EXPERIMENT, HEALTHY, BENIGN)


class Story:
    """The runs from their start until nothing more can be notified, and what every lane made of them."""

    def __init__(self, lanes: dict[str, Lane], pager: Pager) -> None:
        self.lanes = lanes
        self.pager = pager
        self.began = time.time()
        self.killed_at = 0.0
        self.ended = 0.0

    def tell(self) -> None:
        for lane in self.lanes.values():
            lane.wait_until_ready()
        self._kill_at_cascade()
        self._await("the dying run is non-finite", lambda lane: _state(lane, DYING) == State.NONFINITE.code)
        self._await("a page about it", lambda lane: len(self.pager.pages(lane.name, DYING.run_id)) >= 2)
        self._await("the experiment is non-finite", lambda lane: _state(lane, EXPERIMENT) == State.NONFINITE.code)
        until("the healthy run has closed", lambda: HEALTHY.ended)
        until("the benign run has closed", lambda: BENIGN.ended)
        for run in (HEALTHY, BENIGN, KILLED):
            self._await(f"the target of the {run.run_id} run is gone", lambda lane, run=run: _state(lane, run) is None)
        last = time.time()
        self._await("a second notification would have come", lambda lane: lane.has_evaluated(last + GROUP_INTERVAL + 2))
        self.ended = time.time()

    def _kill_at_cascade(self) -> None:
        self._await("the doomed run is in a cascade", lambda lane: _state(lane, KILLED) == State.CASCADE.code)
        self.killed_at = time.time()
        KILLED.kill()

    def _await(self, what: str, condition: Callable[[Lane], bool]) -> None:
        for lane in self.lanes.values():
            until(f"{what} ({lane.name})", lambda lane=lane: condition(lane), seconds=90)


def _state(lane: Lane, run: Run) -> float | None:
    return lane.value(f'max(gradexporter_health_state{{run_id="{run.run_id}"}})')


@pytest.fixture(scope="module")
def story(tool: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    programs = {}
    for name, where in LANES.items():
        try:
            programs[name] = tool("prometheus", lane=where), tool("prometheus-alertmanager", lane=where)
        except pytest.skip.Exception as skipped:
            reason = str(skipped)
    if not programs:
        pytest.skip(reason)
    with ExitStack() as stack:
        pager = Pager()
        stack.callback(pager.stop)
        folder = tmp_path_factory.mktemp("runs")
        for run in RUNS:
            stack.callback(run.kill)
            run.start(folder)
        lanes = {}
        for name, (prometheus, alertmanager) in programs.items():
            lanes[name] = Lane(name, prometheus, alertmanager, RUNS, pager, tmp_path_factory.mktemp(name))
            stack.callback(lanes[name].kill)
        told = Story(lanes, pager)
        told.tell()
        yield told


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest, story: Story) -> Lane:
    if request.param not in story.lanes:
        pytest.skip(f"the programs of .tools/{request.param} are missing; `make tools` installs them")
    return story.lanes[request.param]


def names(pages: list[Notification]) -> list[str]:
    """The alert of every page; our route groups by alert, so that a page has one."""
    return [alert["labels"]["alertname"] for page in pages for alert in page.payload["alerts"]]


# -- pages ----------------------------------------------------------------------------------------


def test_a_dying_run_of_four_ranks_pages_once_at_its_cascade_and_once_at_its_nan(story: Story, lane: Lane):
    pages = story.pager.pages(lane.name, DYING.run_id)

    assert names(pages) == ["GradexporterGradientCascade", "GradexporterNonfinite"]
    for page in pages:
        [alert] = page.payload["alerts"]
        assert alert["labels"]["severity"] == "critical"
        assert alert["labels"]["namespace"] == NAMESPACE
        assert not {"rank", "instance", "pod"} & set(alert["labels"])


def test_the_non_finite_page_does_not_wait_for_the_group_that_the_cascade_opened(story: Story, lane: Lane):
    cascade, nonfinite = story.pager.pages(lane.name, DYING.run_id)
    [alert] = nonfinite.payload["alerts"]
    assert cascade.received < nonfinite.received
    assert 0 <= nonfinite.received - moment(alert["startsAt"]) <= 2


def test_the_text_of_a_page_names_the_culprit_layer_and_rank(story: Story, lane: Lane):
    cascade, nonfinite = (page.payload["alerts"][0]["annotations"] for page in story.pager.pages(lane.name, "dying"))

    assert re.search(r"layer: [0246] on rank [0-3]\b", cascade["description"], re.IGNORECASE)
    assert re.search(r"layer 6 on rank [0-3]\b", nonfinite["description"])
    assert "step 59" in nonfinite["description"]
    for texts in (cascade, nonfinite):
        assert "dying" in texts["description"]
        assert "<no value>" not in texts["description"]
        assert not re.search(r"\d", texts["summary"])


def test_a_run_that_is_killed_at_its_cascade_still_pages_once(story: Story, lane: Lane):
    pages = story.pager.pages(lane.name, KILLED.run_id)

    assert names(pages) == ["GradexporterGradientCascade"]


def test_the_alert_of_a_killed_run_outlives_its_target(story: Story, lane: Lane):
    """A page that resolved itself at the next scrape would tell the on-call that all is well."""
    open_alerts = lane.alerts(KILLED.run_id)

    assert story.ended > story.killed_at + GROUP_INTERVAL
    assert open_alerts["GradexporterGradientCascade"]["state"] == "firing"
    assert "GradexporterDiedWhileUnhealthy" in open_alerts


@pytest.mark.parametrize("run", [HEALTHY, BENIGN, EXPERIMENT], ids=lambda run: run.run_id)
def test_nobody_is_woken_by(run: Run, story: Story, lane: Lane):
    assert story.pager.pages(lane.name, run.run_id) == []
    assert not [alert for alert in lane.alerts(run.run_id).values() if alert["labels"]["severity"] == "critical"]


def test_a_benign_spike_is_a_ticket_and_its_normal_end_no_death(lane: Lane):
    """The run closed while it was still in state spike."""
    last = lane.value(f'max(last_over_time(gradexporter_health_state{{run_id="{BENIGN.run_id}"}}[5m]))')

    assert last == State.SPIKE.code
    assert set(lane.alerts(BENIGN.run_id)) == {"GradexporterGradientSpike"}


def test_a_run_with_paging_off_did_fail_and_says_so_everywhere_but_on_the_pager(lane: Lane):
    assert _state(lane, EXPERIMENT) == State.NONFINITE.code
    assert lane.value(f'sum(gradexporter_run_info{{run_id="{EXPERIMENT.run_id}", paging="off"}})') == 1


# -- queries --------------------------------------------------------------------------------------

DASHBOARD = ROOT / "grafana" / "gradexporter-run.json"


def panels(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in node.get("panels", ()):
        yield panel
        yield from panels(panel)


def filled_in(query: str, layer: str = ".+") -> str:
    """The query as Grafana sends it for the dying run: variables and intervals replaced."""
    values = {
        "namespace": NAMESPACE,
        "run": DYING.run_id,
        "run_id": DYING.run_id,
        "rank": "0|1|2|3",
        "layer": layer,
        "attempt": ".*",
        "__rate_interval": "4s",
        "__interval": "1s",
        "__range": "2m",
    }
    filled = re.sub(r"\$\{?(\w+)(?::\w+)?\}?", lambda variable: values.get(variable[1], variable[0]), query)
    assert "$" not in filled, f"a variable of {query} is not known"
    return filled


def returns_data(story: Story, lane: Lane, query: str) -> bool:
    return bool(lane.query_range(query, story.began, story.ended))


def test_every_query_of_every_panel_returns_data(story: Story, lane: Lane):
    queries = {
        f"{panel['title']}: {target['expr']}": filled_in(target["expr"])
        for panel in panels(json.loads(DASHBOARD.read_text()))
        for target in panel.get("targets", ())
    }

    assert len(queries) >= 10
    assert [name for name, query in queries.items() if not returns_data(story, lane, query)] == []


def test_every_variable_and_annotation_of_the_dashboard_finds_something(story: Story, lane: Lane):
    dashboard = json.loads(DASHBOARD.read_text())
    queries = {}
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            definition = variable["query"]["query"] if isinstance(variable["query"], dict) else variable["query"]
            inside = re.fullmatch(r"(?:label_values|query_result)\((.*?)(?:, *\w+)?\)", definition, re.DOTALL)
            assert inside is not None, definition
            queries[variable["name"]] = filled_in(inside[1])
    for annotation in dashboard.get("annotations", {}).get("list", ()):
        if expr := annotation.get("expr") or annotation.get("target", {}).get("expr"):
            queries[annotation["name"]] = filled_in(expr)

    assert {"namespace", "run", "rank"} <= set(queries)
    assert [name for name, query in queries.items() if not returns_data(story, lane, query)] == []


@pytest.mark.parametrize("alert", alerts(AlertConfig()), ids=lambda alert: alert.name)
def test_the_left_hand_side_of_a_rule_returns_data(alert: Any, story: Story, lane: Lane):
    [rule] = [
        rule
        for group in yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())["groups"]
        for rule in group["rules"]
        if rule.get("alert") == alert.name
    ]
    series = lane.query_range(alert.left, story.began, story.ended)

    assert rule["expr"].startswith(f"{alert.left} {alert.right}")
    assert DYING.run_id in {each["metric"]["run_id"] for each in series}


def test_every_recording_rule_has_recorded_the_run(story: Story, lane: Lane):
    recorded = [
        rule["record"]
        for group in yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())["groups"]
        for rule in group["rules"]
        if "record" in rule
    ]

    assert recorded
    for name in recorded:
        assert returns_data(story, lane, f'{name}{{run_id="{DYING.run_id}"}}'), name


# -- the scrape itself ----------------------------------------------------------------------------


def test_every_rank_of_the_run_is_scraped_under_its_own_number(lane: Lane):
    assert lane.value(f'count(count by (rank) (gradexporter_health_state{{run_id="{DYING.run_id}"}}))') == 4
    assert (
        lane.value(
            "min(up * on (instance) group_left () "
            f'group by (instance) (gradexporter_health_state{{run_id="{DYING.run_id}"}}))'
        )
        == 1
    )


def test_no_label_of_ours_collides_with_one_of_the_target(lane: Lane):
    assert lane.query('{__name__=~"gradexporter_.+", exported_namespace=~".+"}') == []
    assert lane.query('{__name__=~"gradexporter_.+", exported_job=~".+"}') == []
    assert lane.query('{__name__=~"gradexporter_.+", exported_instance=~".+"}') == []
