"""The dashboard: valid, lintable, and built so that a run that has ended, or is not finite, is still shown."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT
from jsonschema import Draft7Validator
from promql import (
    VARIABLES,
    annotation_queries,
    counters_without_rate,
    labels,
    labels_of_families,
    panel_queries,
    panels,
    variable_queries,
    windows,
)
from promtool import NOON, Bench, Rank

from gradexporter import metrics
from gradexporter.bundle.queries import NOTHING
from gradexporter.records import FindingKind, Quantity, State

DASHBOARD: dict[str, Any] = json.loads((ROOT / "grafana" / "gradexporter-run.json").read_text())
PANELS = list(panels(DASHBOARD))
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(title: str) -> dict[str, Any]:
    [found] = [panel for panel in PANELS if panel["title"] == title]
    return found


def named(value: Any) -> str:
    return value["title"] if isinstance(value, dict) else value if isinstance(value, str) else value["refId"]


every_panel = pytest.mark.parametrize("panel", PANELS, ids=named)
every_target = pytest.mark.parametrize(
    ("title", "target"), TARGETS, ids=[f"{title}-{target['refId']}" for title, target in TARGETS]
)


# -- schema ---------------------------------------------------------------------------------------


def complaints(schema: dict[str, Any], definition: str, value: Any) -> list[str]:
    validator = Draft7Validator({"$ref": f"#/definitions/{definition}", "definitions": schema["definitions"]})
    return [f"{error.json_path}: {error.message[:200]}" for error in validator.iter_errors(value)]


@pytest.fixture(scope="module")
def grafana(schemas: Path) -> Callable[[str], dict[str, Any]]:
    return lambda name: json.loads((schemas / "grafana" / f"{name}.jsonschema.json").read_text())


def test_the_dashboard_is_valid(grafana):
    assert complaints(grafana("dashboard"), "Dashboard", {**DASHBOARD, "panels": []}) == []


@pytest.mark.parametrize("row", [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"], ids=named)
def test_a_row_is_valid(row, grafana):
    assert complaints(grafana("dashboard"), "RowPanel", row) == []


@every_panel
def test_a_panel_is_valid(panel, grafana):
    own = grafana(panel["type"].replace("-", ""))

    assert complaints(grafana("dashboard"), "Panel", panel) == []
    assert complaints(own, "Options", panel.get("options", {})) == []
    if "FieldConfig" in own["definitions"]:
        assert complaints(own, "FieldConfig", panel["fieldConfig"]["defaults"].get("custom", {})) == []


@every_target
def test_a_target_is_valid(title, target, grafana):
    assert complaints(grafana("prometheus"), "Dataquery", target) == []


def test_the_units_exist(grafana):
    known = {unit["const"] for unit in grafana("units")["definitions"].values() if "const" in unit}

    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS} <= known


# -- what dashboard-linter asks; template-job, template-instance, target-job and target-instance do not apply:
# -- a run is found by its run_id and rank, whatever job and instance scraped it


def test_there_is_one_data_source_and_it_is_a_variable():
    variables = [each for each in DASHBOARD["templating"]["list"] if each["type"] == "datasource"]

    assert [(each["name"], each["label"], each["query"]) for each in variables] == [
        ("datasource", "Data source", "prometheus")
    ]
    assert "__inputs" not in DASHBOARD


@every_panel
def test_a_panel_has_what_a_reader_needs(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == DATASOURCE
    assert panel["targets"]


@every_target
def test_a_target_asks_prometheus_for_something_that_exists(title, target):
    [query] = [query for name, ref, query in panel_queries(DASHBOARD) if (name, ref) == (title, target["refId"])]

    assert target["datasource"] == DATASOURCE
    assert target["legendFormat"]
    found = labels(query, labels_of_families())
    assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= found
    assert counters_without_rate(query) == []


@every_target
def test_a_target_looks_back_over_a_scrape_or_over_the_whole_range(title, target):
    for function, window in re.findall(r"(\w+)\(\w+\{[^}]*\}\[([^\]]+)\]", target["expr"]):
        assert window == ("$__rate_interval" if function in ("rate", "increase") else "$__range")
    assert set(windows(target["expr"])) <= {"$__rate_interval", "$__range"}


@every_target
def test_a_target_is_about_the_chosen_run(title, target):
    selectors = re.findall(r"\w+\{([^}]*)\}", target["expr"])

    assert selectors
    for selector in selectors:
        assert 'namespace=~"$namespace", run_id="$run", rank=~"$rank"' in selector


def test_nobody_edits_it_by_hand():
    assert DASHBOARD["editable"] is False
    assert DASHBOARD["uid"] == "gradexporter-run"


def test_numbers_and_letters_are_unique():
    ids = [panel["id"] for panel in DASHBOARD["panels"]]

    assert len(ids) == len(set(ids))
    for each in PANELS:
        letters = [target["refId"] for target in each["targets"]]
        assert len(letters) == len(set(letters))
    assert len({each["title"] for each in PANELS}) == len(PANELS)


def test_panels_lie_side_by_side():
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x, y in itertools.product(
            range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        )
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


# -- variables and annotations --------------------------------------------------------------------


def test_the_choices_follow_each_other():
    variables = DASHBOARD["templating"]["list"]

    assert [each["name"] for each in variables] == ["datasource", "namespace", "run", "rank"]
    for each in variables[1:]:
        assert each["datasource"] == DATASOURCE
        assert each["refresh"] == 2, "on a change of the time range"
        assert each["label"]
        assert each["description"]
        assert each["query"] == each["definition"]
    namespace, run, rank = variables[1:]
    assert (namespace["multi"], namespace["includeAll"], namespace["allValue"]) == (True, True, ".*")
    assert (run["multi"], run["includeAll"]) == (False, False)
    assert (rank["multi"], rank["includeAll"], rank["allValue"]) == (True, True, ".*")


def test_the_queries_of_variables_and_annotations_exist():
    for name, query in [*variable_queries(DASHBOARD), *annotation_queries(DASHBOARD)]:
        assert labels(query, labels_of_families()), name


def test_a_label_value_can_be_read_off_what_prometheus_answers():
    """Grafana writes a result as ``{label="value"} 1 1700000000000`` and applies the expression to that."""
    for variable in DASHBOARD["templating"]["list"][1:]:
        label = {"namespace": "namespace", "run": "run_id", "rank": "rank"}[variable["name"]]
        found = re.search(variable["regex"].strip("/"), f'{{{label}="team-a/llm 7b"}} 1 1700000000000')

        assert found is not None
        assert found[1] == "team-a/llm 7b"


@pytest.fixture
def bench(tool: Callable[..., str], tmp_path: Path) -> Bench:
    return Bench(tool("promtool"), (ROOT / "alerts" / "rules.yaml").read_text(), tmp_path)


def test_a_run_that_has_ended_can_still_be_chosen(bench):
    """And the one that stepped last comes first; one that has not stepped comes last."""
    ranks = [
        Rank(run_id="ended", gone=NOON - 1800),
        Rank(run_id="running"),
        Rank(run_id="starting", born=NOON, step_seconds=60.0),
    ]
    query = dict(variable_queries(DASHBOARD))["run"].replace("[1h]", "[2h]")

    bench.expect_value(
        ranks,
        NOON + 30,
        query,
        {'{run_id="running"}': NOON + 30, '{run_id="ended"}': NOON - 1815, '{run_id="starting"}': NOON},
    )


def test_alerts_are_drawn_into_every_graph():
    [note] = DASHBOARD["annotations"]["list"]

    assert note["enable"] is True
    assert note["datasource"] == DATASOURCE
    assert 'alertname=~"Gradexporter.+"' in note["expr"]


# -- what our domain needs ------------------------------------------------------------------------


def test_every_state_has_a_word_and_a_colour_of_its_own():
    [mapping] = panel("Health of each rank")["fieldConfig"]["defaults"]["mappings"]

    assert {code: entry["text"] for code, entry in mapping["options"].items()} == {
        str(state.code): str(state).replace("_", " ") for state in State
    }
    assert len({entry["color"] for entry in mapping["options"].values()}) == len(State)


@pytest.mark.parametrize(
    "title", ["Gradient norm", "Loss", "Spike ratio", "Largest magnitudes", "Gradient norm by layer", "Update ratio"]
)
def test_what_grows_by_orders_of_magnitude_has_a_log_axis(title):
    custom = panel(title)["fieldConfig"]["defaults"]["custom"]

    assert custom["scaleDistribution"] == {"type": "log", "log": 10}


def test_the_spike_threshold_is_a_line():
    defaults = panel("Spike ratio")["fieldConfig"]["defaults"]

    assert [step["value"] for step in defaults["thresholds"]["steps"]] == [None, 10]
    assert defaults["custom"]["thresholdsStyle"] == {"mode": "dashed"}


def test_counts_stand_beside_magnitudes_because_nan_is_drawn_as_a_gap():
    counts = {metrics.FINDINGS_TOTAL.name, metrics.NONFINITE_STEPS_TOTAL.name, metrics.HEALTH_STATE.name}
    magnitudes = {metrics.GRADIENT_NORM.name, metrics.LOSS_VALUE.name, metrics.GRADIENT_SPIKE_RATIO.name}
    used = [{name for target in each["targets"] for name in re.findall(r"\w+", target["expr"])} for each in PANELS]

    assert not [names for names in used if names & counts and names & magnitudes]
    assert counts <= set().union(*used)


@every_panel
def test_an_absent_reading_has_words(panel):
    """``NOTHING`` is drawn as text, never as a number."""
    if not any(f"* 0 + {NOTHING}" in target["expr"] for target in panel["targets"]):
        return
    [mapping] = panel["fieldConfig"]["defaults"]["mappings"]

    assert list(mapping["options"]) == [str(NOTHING)]
    assert mapping["options"][str(NOTHING)]["text"]


def test_a_healthy_run_says_so_where_a_broken_panel_would_be_empty(bench):
    queries = {title: query for title, _, query in panel_queries(DASHBOARD, {**VARIABLES, "rank": "0"})}

    for title in ("First non-finite step", "Last clean checkpoint", "Steps to overflow"):
        bench.expect_value([Rank()], NOON, queries[title], {"{}": NOTHING})
    bench.expect_value([Rank()], NOON, queries["Loss scale"], {"{}": 1})
    bench.expect_value([Rank(gone=NOON)], NOON, queries["Loss scale"], {})


def test_the_first_non_finite_value_is_the_first_row(bench):
    ranks = [
        Rank(rank=0, first_nonfinite=(NOON, 61, "loss", Quantity.LOSS), gone=NOON + 60),
        Rank(rank=1, first_nonfinite=(NOON, 59, "6", Quantity.ACTIVATION), gone=NOON + 60),
    ]
    queries = {title: query for title, _, query in panel_queries(DASHBOARD)}
    attempt = 'attempt="0"'

    bench.expect_value(
        ranks,
        NOON + 900,
        queries["First non-finite value"],
        {
            f'{{{attempt}, rank="1", layer="6", quantity="activation"}}': 59,
            f'{{{attempt}, rank="0", layer="loss", quantity="loss"}}': 61,
        },
    )


def test_the_worst_layers_are_the_same_at_every_point(bench):
    """Ten of twelve, chosen by their worst moment in the range."""
    ratios = {str(layer): float(layer) for layer in range(1, 13)}
    queries = {title: query for title, _, query in panel_queries(DASHBOARD)}

    bench.expect_value(
        [Rank(layers=ratios)],
        NOON,
        queries["Worst layers"],
        {f'{{layer="{layer}"}}': layer for layer in range(3, 13)},
    )


def test_findings_of_four_ranks_are_counted_once(bench):
    ranks = [Rank(rank=rank, findings={FindingKind.GRADIENT_SPIKE: (NOON - 20,)}) for rank in range(4)]
    queries = {title: query for title, _, query in panel_queries(DASHBOARD, {**VARIABLES, "rank": ".*"})}
    others = {f'{{finding="{kind}"}}': 0 for kind in FindingKind}

    bench.expect_value(
        ranks,
        NOON + 15,
        queries["Findings"].replace("increase(", "round(increase(").replace("[1m]", "[1m])"),
        {**others, '{finding="gradient_spike"}': 1},
    )


@pytest.mark.parametrize("lane", [None, "new"], ids=["system", "new"])
def test_prometheus_itself_can_read_every_query(tool, tmp_path, lane):
    queries = [query for _, _, query in panel_queries(DASHBOARD)]
    queries += [query for _, query in [*variable_queries(DASHBOARD), *annotation_queries(DASHBOARD)]]
    rules = [{"record": f"query:{index}", "expr": query} for index, query in enumerate(queries)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))

    command = [tool("promtool", lane=lane), "check", "rules", str(tmp_path / "rules.yaml")]
    result = subprocess.run(command, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout + result.stderr
