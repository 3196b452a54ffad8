"""The chart through real Helm 3 and 4, its objects through the operator's schemas, its rules through promtool."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gradexporter import __version__
from gradexporter.config import DEFAULT_PORT

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "gradexporter"
VARIANTS = sorted((CHART / "ci").glob("*-values.yaml"))
ALERTS = [
    rule["alert"]
    for group in yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]

Tool = Callable[..., str]
Manifests = list[dict[str, Any]]


class Helm:
    """One release of Helm, working on the chart."""

    def __init__(self, binary: str, folder: Path) -> None:
        self._binary = binary
        self._folder = folder

    def run(self, *arguments: str | Path, chart: Path = CHART) -> subprocess.CompletedProcess[str]:
        command, *rest = map(str, arguments)
        name = [] if command == "lint" else ["train"]
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(self._folder)}
        return subprocess.run(
            [self._binary, command, *name, str(chart), *rest],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=60,
        )

    def render(self, *arguments: str | Path, chart: Path = CHART) -> Manifests:
        done = self.run("template", "--namespace", "monitoring", *arguments, chart=chart)
        assert done.returncode == 0, done.stderr
        return [document for document in yaml.safe_load_all(done.stdout) if document]

    def refusal(self, *arguments: str | Path) -> str:
        done = self.run("template", *arguments)
        assert done.returncode != 0, done.stdout
        return done.stderr


@pytest.fixture(params=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tool: Tool, tmp_path: Path) -> Helm:
    return Helm(tool("helm", lane=request.param), tmp_path)


def of_kind(manifests: Manifests, kind: str) -> dict[str, Any]:
    [found] = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def value_files(*values: Path) -> Iterator[str]:
    for file in values:
        yield from ("--values", str(file))


# -- every variant --------------------------------------------------------------------------------


def test_there_is_a_file_of_values_for_each_part_switched_off_and_on():
    names = {file.name.removesuffix("-values.yaml") for file in VARIANTS}

    assert names >= {"default", "kube-prometheus-stack", "namespaces", "tls", "some-rules", "dashboards-only"}


@pytest.mark.parametrize("values", VARIANTS, ids=lambda file: file.name)
def test_lint_is_strict_and_finds_nothing(helm: Helm, values: Path):
    done = helm.run("lint", "--strict", *value_files(values))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "[WARNING]" not in done.stdout
    assert "[ERROR]" not in done.stdout


@pytest.mark.parametrize("values", VARIANTS, ids=lambda file: file.name)
def test_every_object_fits_the_schema_of_its_kind(helm: Helm, values: Path, schemas: Path):
    manifests = helm.render(*value_files(values))

    assert manifests
    for manifest in manifests:
        assert manifest["metadata"]["namespace"]
        assert len(manifest["metadata"]["name"]) <= 63
        assert all(isinstance(value, str) for value in manifest["metadata"]["labels"].values())
        if manifest["kind"] == "ConfigMap":
            assert set(manifest) == {"apiVersion", "kind", "metadata", "data"}
        else:
            jsonschema.Draft7Validator(crd_schema(schemas, manifest["kind"])).validate(manifest)


@pytest.mark.parametrize("lane", [None, "new"], ids=["base", "new"])
def test_promtool_accepts_the_rendered_rules(helm: Helm, tool: Tool, lane: str | None, tmp_path: Path):
    promtool = tool("promtool", lane=lane)
    for values in VARIANTS:
        for manifest in helm.render(*value_files(values)):
            if manifest["kind"] == "PrometheusRule":
                file = tmp_path / "rules.yaml"
                file.write_text(yaml.safe_dump({"groups": manifest["spec"]["groups"]}))
                subprocess.run([promtool, "check", "rules", "--lint=all", "--lint-fatal", str(file)], check=True)


def crd_schema(folder: Path, kind: str) -> dict[str, Any]:
    """The operator's schema of a kind, strict: the API server drops unknown keys silently, a test must not."""
    crd = yaml.safe_load((folder / "crds" / f"{kind.lower()}s.yaml").read_text())
    [version] = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    _make_strict(schema)
    jsonschema.Draft7Validator.check_schema(schema)
    return schema


def _make_strict(node: Any) -> None:
    if isinstance(node, list):
        for child in node:
            _make_strict(child)
    elif isinstance(node, dict):
        if isinstance(node.get("properties"), dict):
            node.setdefault("additionalProperties", False)
        if node.get("x-kubernetes-int-or-string"):
            node.pop("type", None)
        # Python wants a flag for the whole expression at its start.
        if isinstance(pattern := node.get("pattern"), str) and "(?i)" in pattern:
            node["pattern"] = "(?i)" + pattern.replace("(?i)", "")
        for child in node.values():
            _make_strict(child)


# -- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "culprit"),
    [
        ("podMonitors.enabled=true", "podMonitors"),
        ("podMonitor.intervall=10s", "intervall"),
        ("podMonitor.interval=ten", "interval"),
        ("podMonitor.interval=", "interval"),
        ("podMonitor.enabled=perhaps", "enabled"),
        ("podMonitor.sampleLimit=many", "sampleLimit"),
        ("podMonitor.port=no_such_port", "port"),
        ("podMonitor.port=a-name-that-is-too-long", "port"),
        ("podMonitor.path=metrics", "path"),
        ("podMonitor.selector.matchLabel.a=b", "matchLabel"),
        ("podMonitor.tlsConfig.insecure=true", "insecure"),
        ("podMonitor.namespaces[0]=Not_A_Namespace", "namespaces"),
        ("rules.disabled=GradexporterNonfinite", "disabled"),
        ("rules.grafanaUrl=https://grafana.example.org/", "grafanaUrl"),
        ("dashboards.labelValue=1", "labelValue"),
        ("commonLabels.team=7", "team"),
    ],
)
def test_an_unknown_key_and_a_wrong_type_are_refused_by_name(helm: Helm, setting: str, culprit: str):
    assert culprit in helm.refusal("--set", setting)


def test_every_object_of_the_values_schema_is_closed():
    """Two hold whatever their owner likes: label maps, whose values are strings, and Helm's own `global`."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    label_map = schema["definitions"]["labels"]
    helms_own = schema["properties"]["global"]

    assert label_map["additionalProperties"] == {"type": "string"}
    for node in _objects(schema):
        if node not in (label_map, helms_own):
            assert node["additionalProperties"] is False, node


def test_every_default_value_is_described_by_the_schema():
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.Draft7Validator(schema).validate(values)
    for section in ("podMonitor", "rules", "dashboards"):
        assert set(values[section]) == set(schema["properties"][section]["properties"])


def _objects(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if node.get("type") == "object":
            yield node
        for child in node.values():
            yield from _objects(child)
    elif isinstance(node, list):
        for child in node:
            yield from _objects(child)


def test_the_chart_works_inside_a_parent_chart_that_switches_it_on(helm: Helm, tmp_path: Path):
    parent = tmp_path / "parent"
    shutil.copytree(CHART, parent / "charts" / "gradexporter")
    (parent / "Chart.yaml").write_text(
        "apiVersion: v2\nname: parent\nversion: 1.0.0\n"
        "dependencies: [{name: gradexporter, version: '*', condition: gradexporter.enabled}]\n"
    )
    (parent / "values.yaml").write_text("global: {region: eu}\ngradexporter: {enabled: true}\n")

    assert {"PodMonitor", "PrometheusRule", "ConfigMap"} == {m["kind"] for m in helm.render(chart=parent)}


# -- PodMonitor -----------------------------------------------------------------------------------


def test_by_default_labelled_pods_of_all_namespaces_are_scraped_at_their_named_port(helm: Helm):
    spec = of_kind(helm.render(), "PodMonitor")["spec"]

    assert spec["selector"] == {"matchLabels": {"gradexporter.io/scrape": "true"}}
    assert spec["namespaceSelector"] == {"any": True}
    assert spec["podMetricsEndpoints"][0]["port"] == "gradexporter"
    assert [endpoint["path"] for endpoint in spec["podMetricsEndpoints"]] == ["/metrics"] * 2


def test_ranks_that_share_a_pod_are_scraped_at_numbered_ports_and_none_twice(helm: Helm):
    first, others = of_kind(helm.render(), "PodMonitor")["spec"]["podMetricsEndpoints"]
    [keep] = [rule for rule in others["relabelings"] if rule.get("action") == "keep"]

    assert first["port"] == "gradexporter"
    assert keep["sourceLabels"] == ["__meta_kubernetes_pod_container_port_name"]
    assert keep["regex"] == "gradexporter-[0-9]+"
    assert "port" not in others


def test_a_selector_of_ones_own_replaces_the_label_of_the_default(helm: Helm):
    spec = of_kind(helm.render(*value_files(CHART / "ci" / "namespaces-values.yaml")), "PodMonitor")["spec"]

    assert spec["selector"]["matchLabels"] == {"app.kubernetes.io/component": "trainer"}
    assert spec["namespaceSelector"] == {"matchNames": ["team-vision", "team-speech"]}


def test_a_limit_of_zero_is_no_limit(helm: Helm):
    spec = of_kind(helm.render("--set", "podMonitor.sampleLimit=0,podMonitor.targetLimit=100000000"), "PodMonitor")

    assert "sampleLimit" not in spec["spec"]
    assert spec["spec"]["targetLimit"] == 100_000_000


def test_additional_labels_reach_the_object_that_the_operator_selects_by_them(helm: Helm):
    one = helm.render("--set", "podMonitor.additionalLabels.release=stack")
    every = helm.render("--set", "commonLabels.release=stack")

    assert of_kind(one, "PodMonitor")["metadata"]["labels"]["release"] == "stack"
    assert "release" not in of_kind(one, "PrometheusRule")["metadata"]["labels"]
    assert {"stack"} == {manifest["metadata"]["labels"]["release"] for manifest in every}


# -- rules ----------------------------------------------------------------------------------------


def test_the_rules_are_those_of_the_repository_braces_and_all(helm: Helm):
    ours = yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())["groups"]

    rendered = of_kind(helm.render("--set", "rules.interval="), "PrometheusRule")["spec"]["groups"]

    assert ours == rendered
    assert "{{ $labels.run_id }}" in json.dumps(rendered)


def test_a_disabled_alert_is_left_out_and_all_others_stay(helm: Helm):
    left_out = ALERTS[-1]

    groups = of_kind(helm.render("--set", f"rules.disabled={{{left_out}}}"), "PrometheusRule")["spec"]["groups"]

    assert ALERTS[:-1] == [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    assert any("record" in rule for group in groups for rule in group["rules"])


def test_disabling_an_alert_that_does_not_exist_names_those_that_do(helm: Helm):
    message = helm.refusal("--set", "rules.disabled={GradexporterNonsense}")

    assert "GradexporterNonsense" in message
    assert all(alert in message for alert in ALERTS)


def test_links_of_a_page_lead_to_the_addresses_of_the_cluster(helm: Helm):
    addresses = "rules.grafanaUrl=https://grafana.example.org,rules.runbookUrl=https://wiki.example.org/runbooks"

    groups = of_kind(helm.render("--set", addresses), "PrometheusRule")["spec"]["groups"]

    for rule in (rule for group in groups for rule in group["rules"] if "alert" in rule):
        assert f"https://wiki.example.org/runbooks/{rule['alert']}.md" == rule["annotations"]["runbook_url"]
        assert rule["annotations"]["dashboard_url"].startswith("https://grafana.example.org/d/gradexporter-run?var-")


def test_rules_are_evaluated_as_often_as_pods_are_scraped(helm: Helm):
    manifests = helm.render()

    intervals = {group["interval"] for group in of_kind(manifests, "PrometheusRule")["spec"]["groups"]}
    endpoints = of_kind(manifests, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert intervals == {endpoint["interval"] for endpoint in endpoints}


# -- dashboards -----------------------------------------------------------------------------------


def test_the_dashboard_is_the_repositorys_byte_for_byte(helm: Helm):
    maps = [manifest for manifest in helm.render() if manifest["kind"] == "ConfigMap"]

    rendered = {name: text for manifest in maps for name, text in manifest["data"].items()}
    assert {file.name: file.read_text() for file in (ROOT / "grafana").glob("*.json")} == rendered


def test_the_sidecar_finds_the_dashboard_and_its_folder(helm: Helm):
    metadata = of_kind(helm.render(), "ConfigMap")["metadata"]

    assert metadata["labels"]["grafana_dashboard"] == "1"
    assert metadata["annotations"]["grafana_folder"] == "Training"


def test_the_dashboard_may_live_in_the_namespace_of_grafana(helm: Helm):
    manifests = helm.render("--set", "dashboards.namespace=grafana")

    assert of_kind(manifests, "ConfigMap")["metadata"]["namespace"] == "grafana"
    assert of_kind(manifests, "PodMonitor")["metadata"]["namespace"] == "monitoring"


# -- the chart as a whole -------------------------------------------------------------------------


def test_what_is_rendered_does_not_depend_on_the_cluster(helm: Helm):
    """GitOps tools render without one; the API server refuses a kind that it lacks, by name."""
    assert helm.render() == helm.render("--api-versions", "monitoring.coreos.com/v1")


def test_a_chart_packed_without_its_rules_is_an_error_not_an_empty_object(helm: Helm, tmp_path: Path):
    for missing in ("rules.yaml", "gradexporter-run.json"):
        chart = tmp_path / missing
        shutil.copytree(CHART, chart)
        (chart / "files" / missing).unlink()

        done = helm.run("template", chart=chart)

        assert done.returncode != 0
        assert "files/" in done.stderr


def notes(tool: Tool, *settings: str) -> str:
    """What an installation prints; only Helm 4 installs without a cluster, for show."""
    done = Helm(tool("helm", lane="helm4"), Path("/nonexistent")).run(
        "install", "--dry-run=client", *(part for setting in settings for part in ("--set", setting))
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


def test_the_notes_say_how_a_pod_is_labelled_and_which_traps_there_are(tool: Tool):
    text = notes(tool)

    assert 'gradexporter.io/scrape: "true"' in text
    assert f"{{name: gradexporter, containerPort: {DEFAULT_PORT}}}" in text
    assert f"{{name: gradexporter-1, containerPort: {DEFAULT_PORT + 1}}}" in text
    assert "commonLabels.release" in text
    assert "searchNamespace" in text
    assert "refuses what it does not know" in text


def test_the_notes_keep_quiet_about_what_is_in_order(tool: Tool):
    text = notes(tool, "commonLabels.release=stack", "dashboards.enabled=false")

    assert "NilUsesHelmValues" not in text
    assert "searchNamespace" not in text


def test_the_notes_say_so_when_everything_is_switched_off(tool: Tool):
    text = notes(tool, "podMonitor.enabled=false", "rules.enabled=false", "dashboards.enabled=false")

    assert "Nothing was installed" in text


def test_the_chart_has_the_version_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())

    assert (__version__, __version__) == (chart["version"], chart["appVersion"])
