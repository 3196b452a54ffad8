"""The bundle: what is generated is what is committed, and every name in it exists."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from conftest import ROOT
from promql import fenced_queries, labels, labels_of_families, rule_expressions, rule_sides, template_queries

from gradexporter import bundle
from gradexporter.bundle import readme
from gradexporter.bundle.promql import duration, series
from gradexporter.bundle.rules import alerts
from gradexporter.config import AlertConfig, Config, ConfigError, GradexporterError
from gradexporter.metrics import CATALOG, HEALTH_STATE, PREFIX, STEP_GRADIENT_NORM, Section
from gradexporter.records import Shape

RULES = yaml.safe_load((ROOT / "alerts" / "rules.yaml").read_text())
RUNBOOKS = sorted((ROOT / "alerts" / "runbooks").glob("*.md"))
ALERTS = alerts(AlertConfig())
FAMILIES = labels_of_families(AlertConfig().routing_labels)

needs_sdk = pytest.mark.skipif(sys.version_info < (3, 11), reason="grafana-foundation-sdk needs Python 3.11")

PAGE = f"# Title\n\nBefore.\n\n{readme.BEGIN}\nold\n{readme.END}\n\nAfter.\n"


# -- generate, write, check -----------------------------------------------------------------------


@needs_sdk
def test_what_is_committed_is_what_would_be_written():
    assert bundle.check(ROOT) == []


@needs_sdk
def test_generating_twice_gives_the_same_bytes():
    assert bundle.generate() == bundle.generate(Config())


@needs_sdk
def test_the_chart_holds_the_same_bytes():
    files = bundle.generate()

    assert files["helm/gradexporter/files/rules.yaml"] == files["alerts/rules.yaml"]
    assert files["helm/gradexporter/files/gradexporter-run.json"] == files["grafana/gradexporter-run.json"]


@needs_sdk
def test_write_tells_what_it_changed(tmp_path):
    (tmp_path / "README.md").write_text(PAGE)

    assert bundle.write(tmp_path) == [
        "alerts/rules.yaml",
        "grafana/gradexporter-run.json",
        "helm/gradexporter/files/rules.yaml",
        "helm/gradexporter/files/gradexporter-run.json",
        "README.md",
    ]
    assert bundle.write(tmp_path) == []
    assert bundle.check(tmp_path) == []


@needs_sdk
@pytest.mark.parametrize(
    ("part", "paths"),
    [
        ("rules", ["alerts/rules.yaml"]),
        ("dashboards", ["grafana/gradexporter-run.json"]),
        ("chart", ["helm/gradexporter/files/rules.yaml", "helm/gradexporter/files/gradexporter-run.json"]),
        ("readme", ["README.md"]),
    ],
)
def test_a_part_is_written_alone(tmp_path, part, paths):
    (tmp_path / "README.md").write_text(PAGE)

    assert bundle.write(tmp_path, part) == paths
    assert bundle.check(tmp_path, part) == []


@needs_sdk
def test_a_folder_without_a_readme_gets_the_files(tmp_path):
    bundle.write(tmp_path)

    assert not (tmp_path / "README.md").exists()
    assert bundle.check(tmp_path) == []


def test_check_says_which_file_is_stale_and_how(tmp_path):
    bundle.write(tmp_path, "rules")
    file = tmp_path / "alerts" / "rules.yaml"
    file.write_text(file.read_text().replace("- 600", "- 601", 1))

    [stale] = bundle.check(tmp_path, "rules")

    path, found, wanted = stale.splitlines()
    assert path == "alerts/rules.yaml"
    assert found.startswith("  -")
    assert found.endswith("> time() - 601")
    assert wanted.startswith("  +")
    assert wanted.endswith("> time() - 600")


def test_check_keeps_a_long_difference_short(tmp_path):
    bundle.write(tmp_path, "rules")
    (tmp_path / "alerts" / "rules.yaml").write_text("something else\n")

    [stale] = bundle.check(tmp_path, "rules")

    assert len(stale.splitlines()) < 16
    assert stale.splitlines()[-1].endswith("more lines")


def test_check_says_which_file_is_missing(tmp_path):
    assert bundle.check(tmp_path, "rules") == ["alerts/rules.yaml\n  does not exist"]


def test_settings_reach_the_files(tmp_path):
    config = Config(alerts=AlertConfig(lookback_seconds=300))
    bundle.write(tmp_path, "rules", config)

    assert "[5m]" in (tmp_path / "alerts" / "rules.yaml").read_text()
    assert bundle.check(tmp_path, "rules", config) == []
    assert len(bundle.check(tmp_path, "rules")) == 1


def test_an_unknown_part_is_refused(tmp_path):
    with pytest.raises(
        GradexporterError, match="no part 'alerts' of the bundle; the parts are rules, dashboards, chart, readme"
    ):
        bundle.write(tmp_path, "alerts")


@pytest.mark.parametrize("page", [None, "# No markers\n", f"{readme.END}\n{readme.BEGIN}\n"])
def test_a_readme_without_a_place_for_the_table_is_refused(tmp_path, page):
    if page is not None:
        (tmp_path / "README.md").write_text(page)

    with pytest.raises(GradexporterError, match=r"the metrics table has no place in .*README\.md"):
        bundle.write(tmp_path, "readme")


def without_sdk(code: str) -> subprocess.CompletedProcess[str]:
    script = "import sys\nsys.modules['grafana_foundation_sdk'] = None\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_rules_and_table_need_no_grafana_sdk(tmp_path):
    (tmp_path / "README.md").write_text(PAGE)

    result = without_sdk(
        f"""
        from pathlib import Path
        from gradexporter import bundle
        bundle.write(Path({str(tmp_path)!r}), "rules")
        bundle.write(Path({str(tmp_path)!r}), "readme")
        """
    )

    assert result.returncode == 0, result.stderr
    assert bundle.check(tmp_path, "rules") == bundle.check(tmp_path, "readme") == []


def test_dashboards_without_the_sdk_name_the_extra():
    """As an ImportError for programs and as an error of ours for the command line."""
    result = without_sdk(
        """
        from gradexporter import bundle
        from gradexporter.config import GradexporterError
        try:
            bundle.generate(only="dashboards")
        except ImportError as error:
            assert isinstance(error, GradexporterError)
            print(error)
        """
    )

    assert result.stdout == "dashboards need Python 3.11 or newer and: pip install 'gradexporter[bundle]'\n"


# -- the metrics table ----------------------------------------------------------------------------


def test_the_table_has_every_family_once_under_its_section():
    table = readme.table()

    for spec in CATALOG:
        assert table.count(f"| `{spec.name}` |") == 1
    assert re.findall(r"^\*\*(.+)\*\*$", table, re.MULTILINE) == [section.value for section in Section]
    row = f"| `{HEALTH_STATE.name}` | gauge | `attempt` | {HEALTH_STATE.help} |"
    assert row in table


def test_the_table_leaves_the_prose_alone():
    page = readme.splice(PAGE)

    assert page.startswith("# Title\n\nBefore.\n\n<!-- metrics:begin -->\n")
    assert page.endswith("<!-- metrics:end -->\n\nAfter.\n")
    assert "\nold\n" not in page
    assert readme.splice(page) == page


# -- every name exists ----------------------------------------------------------------------------


def test_series_are_named_in_the_catalogue_alone():
    """Elsewhere no string starts with the prefix of a series."""
    package = ROOT / "gradexporter"
    for file in sorted(package.rglob("*.py")):
        if file.is_relative_to(package / "metrics"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not node.value.startswith(f"{PREFIX}_"), f"{file.name}:{node.lineno}: {node.value!r}"


@pytest.mark.parametrize(("name", "expr"), rule_expressions(RULES))
def test_a_rule_uses_series_and_labels_that_exist(name, expr):
    assert {"namespace", "run_id"} <= labels(expr, FAMILIES)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_an_alert_is_one_a_run_and_attempt(alert):
    assert labels(alert.expr, FAMILIES) == {"namespace", "run_id", "attempt"}


@pytest.mark.parametrize(("name", "query"), template_queries(RULES))
def test_a_text_asks_for_series_and_labels_that_exist(name, query):
    labels(query, FAMILIES)


def test_every_label_that_a_text_prints_is_there():
    for group in RULES["groups"]:
        for rule in group["rules"]:
            for text in {**rule.get("labels", {}), **rule.get("annotations", {})}.values():
                for query, body in re.findall(r"printf `([^`]*)`[^|]*\| query \}\}(.*?)(?=\{\{ with printf|$)", text):
                    printed = set(re.findall(r'label "(\w+)"', body))
                    assert printed <= labels(query.replace("%q", '"x"'), FAMILIES), rule["alert"]
                assert set(re.findall(r"\$labels\.(\w+)", text)) <= {"namespace", "run_id", "attempt"}


def test_the_left_hand_side_of_every_alert_is_what_the_rule_says():
    sides = dict(rule_sides(RULES))

    assert list(sides) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        assert re.sub(r"\s", "", sides[alert.name]) == re.sub(r"\s", "", alert.left)


def test_a_selector_that_does_not_exist_cannot_be_written():
    with pytest.raises(AssertionError, match="has no label"):
        series(HEALTH_STATE, {"layer": "6"})
    with pytest.raises(AssertionError, match="only a histogram has parts"):
        series(STEP_GRADIENT_NORM)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (15, "15s"), (90, "90s"), (600, "10m"), (7200, "2h")])
def test_durations_are_written_as_prometheus_does(seconds, text):
    assert duration(seconds) == text


PAGES = [ROOT / "README.md", ROOT / "helm" / "gradexporter" / "README.md", *RUNBOOKS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_names_series_that_exist(page: Path):
    text = page.read_text()

    for query in fenced_queries(text):
        labels(query, FAMILIES)
    assert set(re.findall(rf"\b{PREFIX}_\w+", text)) <= set(FAMILIES) | {STEP_GRADIENT_NORM.name}


# -- runbooks -------------------------------------------------------------------------------------


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    assert [path.stem for path in RUNBOOKS] == sorted(alert.name for alert in ALERTS)
    for group in RULES["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                url = rule["annotations"]["runbook_url"]
                assert url == f"{AlertConfig().runbook_url}/{rule['alert']}.md"


@pytest.mark.parametrize("path", RUNBOOKS, ids=lambda path: path.stem)
def test_a_runbook_has_the_four_sections_in_order(path):
    text = path.read_text()

    assert text.startswith(f"# {path.stem}\n")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert len(text.splitlines()) < 70


def test_the_runbooks_know_every_shape_of_a_failed_run():
    """Shapes that page; the others are for the dashboard."""
    known = "".join(path.read_text() for path in RUNBOOKS)
    quiet = {Shape.DEAD_OR_VANISHING, Shape.STALLED_UPDATES}

    assert [shape for shape in Shape if shape not in quiet and f"`{shape}`" not in known] == []


def test_a_runbook_points_at_panels_that_exist():
    titles = set(re.findall(r'"title": "([^"]+)"', (ROOT / "grafana" / "gradexporter-run.json").read_text()))

    for path in RUNBOOKS:
        for title in re.findall(r"(?<!\*)\*([A-Z][^*\n]+)\*(?!\*)", path.read_text()):
            assert title in titles, f"{path.name}: {title}"


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"lookback_seconds": 0}, "alerts.lookback_seconds cannot be 0: give a whole number above 0; 600"),
        ({"lookback_seconds": 1.5}, "alerts.lookback_seconds cannot be 1.5: give a whole number above 0"),
        ({"stalled_step_times": float("inf")}, "alerts.stalled_step_times cannot be inf: give a number above 0"),
        ({"spikes_per_step": 1}, "alerts.spikes_per_step cannot be 1: give a share, such as 0.001"),
        ({"routing_labels": ("cost center",)}, "alerts.routing_labels cannot be 'cost center': label names are"),
        ({"routing_labels": ("namespace",)}, "alerts.routing_labels cannot be 'namespace': this label belongs to"),
        ({"routing_labels": "team"}, "alerts.routing_labels cannot be 'team': give a tuple of label names"),
        ({"runbook_url": 'https://example.org/"'}, "alerts.runbook_url cannot be .*: give an address"),
        ({"grafana_url": None}, "alerts.grafana_url cannot be None: give an address"),
    ],
)
def test_a_setting_of_the_rules_that_cannot_be_used_is_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        AlertConfig(**settings)
