"""Grafana panels: the only file that knows the Grafana SDK, which only generating dashboards needs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradexporter.config import GradexporterError


class MissingExtraError(GradexporterError, ImportError):
    """The Grafana SDK is not there; the text names the extra that brings it."""


try:
    with warnings.catch_warnings():
        # The SDK would rather write a schema that no Grafana before 12 reads, and says so at its import.
        warnings.simplefilter("ignore", DeprecationWarning)
        from grafana_foundation_sdk.builders import (
            bargauge,
            common,
            dashboard,
            heatmap,
            prometheus,
            stat,
            statetimeline,
            table,
            timeseries,
        )
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.models import common as common_models
        from grafana_foundation_sdk.models import dashboard as models
        from grafana_foundation_sdk.models import heatmap as heatmap_models
        from grafana_foundation_sdk.models import prometheus as prometheus_models
except ImportError as error:
    advice = "dashboards need Python 3.11 or newer and: pip install 'gradexporter[bundle]'"
    raise MissingExtraError(advice) from error

DATASOURCE = common_models.DataSourceRef(type_val="prometheus", uid="${datasource}")

GREEN, YELLOW, ORANGE, RED, BLUE, GREY = "green", "yellow", "orange", "dark-red", "blue", "text"

BY_NAME, BY_NUMBER, AS_QUERIED = (
    models.VariableSort.ALPHABETICAL_ASC,
    models.VariableSort.NUMERICAL_ASC,
    models.VariableSort.DISABLED,
)


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    expr: str
    legend: str = ""
    instant: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """How a value is shown."""

    value: int
    text: str
    color: str


def lines(
    title: str,
    description: str,
    queries: Sequence[Query],
    *,
    unit: str = "none",
    log: bool = False,
    bars: bool = False,
    threshold: float | None = None,
    width: int = 12,
) -> Any:
    """Values over time; ``log`` for magnitudes, ``bars`` for events, ``threshold`` as a dashed red line."""
    panel = timeseries.Panel().unit(unit).height(8).span(width).line_width(1).fill_opacity(0)
    panel = panel.legend(common.VizLegendOptions().show_legend(True).placement("bottom").display_mode("list").calcs([]))
    panel = panel.tooltip(common.VizTooltipOptions().mode("multi").sort("desc"))
    panel = panel.show_points(common_models.VisibilityMode.NEVER)
    if log:
        logarithmic = common.ScaleDistributionConfig().type(common_models.ScaleDistribution.LOG).log(10)
        panel = panel.scale_distribution(logarithmic)
    if bars:
        stacked = common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A")
        panel = panel.draw_style(common_models.GraphDrawStyle.BARS).fill_opacity(80).stacking(stacked).min(0)
    if threshold is not None:
        steps = [models.Threshold(None, "transparent"), models.Threshold(threshold, RED)]
        panel = panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        dashed = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(dashed)
    return _dressed(panel, title, description, queries)


def states(title: str, description: str, queries: Sequence[Query], words: Sequence[Word], *, width: int = 24) -> Any:
    """Coloured bands over time, one a series, 20 to a page."""
    panel = statetimeline.Panel().unit("none").height(8).span(width).mappings(_mappings(words))
    panel = panel.show_value(common_models.VisibilityMode.NEVER).row_height(0.85).merge_values(True)
    panel = panel.line_width(0).fill_opacity(85).per_page(20)
    panel = panel.legend(common.VizLegendOptions().show_legend(True).placement("bottom").display_mode("list").calcs([]))
    panel = panel.tooltip(common.VizTooltipOptions().mode("single").sort("none"))
    panel = panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(GREY))
    return _dressed(panel, title, description, queries)


def number(
    title: str, description: str, query: Query, *, unit: str = "none", words: Sequence[Word] = (), width: int = 4
) -> Any:
    """One large number: the last one of the range, so that a run that has ended keeps it."""
    panel = stat.Panel().unit(unit).height(4).span(width).mappings(_mappings(words))
    panel = panel.graph_mode(common_models.BigValueGraphMode.NONE).color_mode(common_models.BigValueColorMode.VALUE)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel = panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.FIXED).fixed_color(GREY))
    return _dressed(panel, title, description, [query])


def ranking(title: str, description: str, query: Query, *, threshold: float, width: int = 12) -> Any:
    """Horizontal bars, red beyond the threshold."""
    steps = [models.Threshold(None, GREEN), models.Threshold(threshold, RED)]
    panel = bargauge.Panel().unit("none").decimals(1).height(8).span(width).min(0)
    panel = panel.orientation(common_models.VizOrientation.HORIZONTAL)
    panel = panel.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    panel = panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    return _dressed(panel, title, description, [query])


def buckets(title: str, description: str, query: Query, *, width: int = 12) -> Any:
    """A heat map of a histogram over time."""
    color = heatmap.HeatmapColorOptions().mode(heatmap_models.HeatmapColorMode.SCHEME).scheme("Oranges").steps(64)
    color = color.scale(heatmap_models.HeatmapColorScale.EXPONENTIAL).exponent(0.5).fill("dark-orange").reverse(False)
    panel = heatmap.Panel().height(8).span(width).unit("none").calculate(False).color(color)
    panel = panel.y_axis(heatmap.YAxisConfig().unit("sci"))
    return _dressed(panel, title, description, [query], prometheus_models.PromQueryFormat.HEATMAP)


def rows(title: str, description: str, query: Query, columns: Sequence[tuple[str, str]], *, width: int = 12) -> Any:
    """A table of labels and the value, in this order: pairs of field and heading; ``Value`` is the value's field."""
    names = dict(columns)
    order = {field: index for index, (field, _) in enumerate(columns)}
    kept = models.DataTransformerConfig(
        id_val="filterFieldsByName", options={"include": {"names": [field for field, _ in columns]}}
    )
    arranged = models.DataTransformerConfig(
        id_val="organize", options={"excludeByName": {}, "indexByName": order, "renameByName": names}
    )
    panel = table.Panel().unit("none").height(8).span(width).transformations([kept, arranged]).show_header(True)
    return _dressed(panel, title, description, [query], prometheus_models.PromQueryFormat.TABLE)


def variable(
    name: str, label: str, description: str, expr: str, regex: str, *, sort: models.VariableSort, many: bool
) -> Any:
    """A choice filled by a query over the time range, so that what has ended can still be chosen."""
    query = f"query_result({expr})"
    built = dashboard.QueryVariable(name).label(label).description(description).datasource(DATASOURCE)
    built = built.query(query).definition(query).regex(regex).sort(sort).multi(many).include_all(many)
    built = built.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
    if many:
        every = models.VariableOption(selected=True, text=["All"], value=["$__all"])
        built = built.all_value(".*").current(every)
    return built


def datasource_variable() -> Any:
    """The choice of the Prometheus that everything else reads."""
    built = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    return built.description("The Prometheus that scrapes the training runs.")


def encode(
    *,
    uid: str,
    title: str,
    description: str,
    variables: Sequence[Any],
    sections: Sequence[tuple[str, Sequence[Any]]],
    annotations: Sequence[tuple[str, str, str, str]],
) -> str:
    """The dashboard as JSON, byte for byte the same for the same arguments.

    ``annotations`` are name, query, title and text.
    """
    built = dashboard.Dashboard(title).uid(uid).description(description).tags(["gradexporter"]).readonly()
    built = built.time("now-1h", "now").refresh("30s").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    for each in variables:
        built = built.with_variable(each)
    for name, expr, heading, text in annotations:
        note = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color("red").expr(expr)
        built = built.annotation(note.title_format(heading).text_format(text))
    for heading, panels in sections:
        built = built.with_row(dashboard.Row(heading))
        for panel in panels:
            built = built.with_panel(panel)
    links = dashboard.DashboardLink("gradexporter").type(models.DashboardLinkType.DASHBOARDS).tags(["gradexporter"])
    built = built.link(links.as_dropdown(True).include_vars(True).keep_time(True))
    page = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    for number_of_panel, panel in enumerate(page["panels"], start=1):
        panel["id"] = number_of_panel  # the SDK gives every row 0 and panels none
    return json.dumps(page, indent=2, sort_keys=True) + "\n"


def _mappings(words: Sequence[Word]) -> list[Any]:
    named = {str(word.value): models.ValueMappingResult(text=word.text, color=word.color) for word in words}
    return [models.ValueMap(options=named)] if named else []


def _dressed(panel: Any, title: str, description: str, queries: Sequence[Query], shape: Any = None) -> Any:
    panel = panel.title(title).description(description).datasource(DATASOURCE)
    for letter, query in zip("ABCDEFGH", queries, strict=False):
        target = prometheus.Dataquery().expr(query.expr).ref_id(letter).legend_format(query.legend or "__auto")
        target = target.datasource(DATASOURCE).format(shape or prometheus_models.PromQueryFormat.TIME_SERIES)
        target = target.editor_mode(prometheus_models.QueryEditorMode.CODE)
        panel = panel.with_target(target.instant() if query.instant else target.range())
    return panel
