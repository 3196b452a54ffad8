"""PromQL read as a tree: which series and labels an expression uses, and whether they exist.

The expressions are those of the rules, of the texts in the rules, of the dashboards and of the pages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import promql_parser

from gradexporter.bundle.promql import TARGET_LABELS
from gradexporter.metrics import CATALOG, IDENTITY_LABELS, RUN_INFO, Kind

ALERT_LABELS = {"alertname", "alertstate", "severity", "attempt", *IDENTITY_LABELS, *TARGET_LABELS}

VARIABLES = {
    "datasource": "prometheus",
    "namespace": "ml",
    "run": "run-a",
    "rank": "0|1",
    "__range": "1h",
    "__rate_interval": "1m",
}
"""Values for Grafana's variables, where the values do not matter."""


def labels_of_families(routing_labels: tuple[str, ...] = ()) -> dict[str, set[str]]:
    """Every name that an expression may select, with the labels that its series can have."""
    families = {"ALERTS": set(ALERT_LABELS)}
    for spec in CATALOG:
        labels = {*spec.labels, *IDENTITY_LABELS, *TARGET_LABELS, *(routing_labels if spec is RUN_INFO else ())}
        if spec.kind is Kind.HISTOGRAM:
            families.update({f"{spec.name}_bucket": labels | {"le"}, f"{spec.name}_sum": labels})
            families[f"{spec.name}_count"] = labels
        else:
            families[spec.name] = labels
    return families


def filled(query: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """The query with ``$name`` and ``${name}`` replaced; a variable that is not known is an error."""
    return re.sub(r"\$(\w+)|\$\{(\w+)\}", lambda found: variables[found[1] or found[2]], query)


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that shows something, those inside of rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panels(panel)
        else:
            yield panel


def panel_queries(dashboard: Mapping[str, Any], variables: Mapping[str, str] = VARIABLES) -> list[tuple[str, str, str]]:
    """Panel title, refId and query of every target, with variables filled in."""
    return [
        (panel["title"], target["refId"], filled(target["expr"], variables))
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def variable_queries(dashboard: Mapping[str, Any], variables: Mapping[str, str] = VARIABLES) -> list[tuple[str, str]]:
    """Name and query of every variable that is filled by one."""
    found = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            inside = re.fullmatch(r"query_result\((.*)\)", variable["query"])
            assert inside is not None, variable["query"]
            found.append((variable["name"], filled(inside[1], variables)))
    return found


def annotation_queries(dashboard: Mapping[str, Any], variables: Mapping[str, str] = VARIABLES) -> list[tuple[str, str]]:
    """Name and query of every annotation."""
    return [(note["name"], filled(note["expr"], variables)) for note in dashboard["annotations"]["list"]]


def rule_expressions(rules: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and expression of every rule of a rule file."""
    return [(rule.get("alert") or rule["record"], rule["expr"]) for group in rules["groups"] for rule in group["rules"]]


def rule_sides(rules: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name of every alert and the left-hand side of its comparison: what must have data for it to judge at all."""
    sides = []
    for name, expr in rule_expressions(rules):
        tree = promql_parser.parse(expr)
        while isinstance(tree, promql_parser.BinaryExpr) and str(tree.op) in ("and", "or", "unless"):
            tree = tree.lhs
        if isinstance(tree, promql_parser.BinaryExpr) and str(tree.op) in (">", "<", ">=", "<=", "==", "!="):
            sides.append((name, tree.lhs.prettify()))
    return sides


def template_queries(rules: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Rule and query of every template in its labels and annotations, ``%q`` filled in."""
    return [
        (rule["alert"], query.replace("%q", '"x"'))
        for group in rules["groups"]
        for rule in group["rules"]
        for text in {**rule.get("labels", {}), **rule.get("annotations", {})}.values()
        for query in re.findall(r"printf `([^`]*)`", text)
    ]


def fenced_queries(page: str) -> list[str]:
    """Every PromQL block of a Markdown page."""
    return re.findall(r"```promql\n(.*?)\n```", page, re.DOTALL)


def counters_without_rate(expr: str) -> list[str]:
    """Counters that are read as they are: their value means nothing across a restart."""
    return [
        name
        for name, functions in _selections(promql_parser.parse(expr), ())
        if name.endswith(("_total", "_bucket", "_count", "_sum")) and not {"rate", "irate", "increase"} & set(functions)
    ]


def windows(expr: str) -> list[str]:
    """What stands in the brackets of each range selector, variables unfilled."""
    return re.findall(r"\[([^\]]+)\]", expr)


def labels(expr: str, families: Mapping[str, set[str]]) -> set[str]:
    """Labels that the result can have; AssertionError for a series, matcher or grouping that does not exist."""
    return _labels(promql_parser.parse(expr), families)


def _labels(node: Any, families: Mapping[str, set[str]]) -> set[str]:
    match type(node).__name__:
        case "VectorSelector":
            assert node.name in families, f"there is no series {node.name}"
            known = families[node.name]
            for matcher in node.matchers.matchers:
                assert matcher.name in known, f"{node.name} has no label {matcher.name}"
            return set(known)
        case "MatrixSelector":
            return _labels(node.vector_selector, families)
        case "SubqueryExpr" | "ParenExpr" | "UnaryExpr":
            return _labels(node.expr, families)
        case "AggregateExpr":
            return _aggregated(node, _labels(node.expr, families))
        case "Call":
            inside = [_labels(argument, families) for argument in node.args]
            made = {node.args[1].val} if node.func.name == "label_replace" else set()
            return set().union(*inside) | made
        case "BinaryExpr":
            return _joined(node, _labels(node.lhs, families), _labels(node.rhs, families))
        case _:
            return set()


def _aggregated(node: Any, inside: set[str]) -> set[str]:
    if node.modifier is None:
        return inside if str(node.op) in ("topk", "bottomk") else set()
    named = set(node.modifier.labels)
    assert named <= inside, f"{node.prettify()}: no label {named - inside} to group by"
    return inside - named if "Without" in str(node.modifier.type) else named


def _joined(node: Any, left: set[str], right: set[str]) -> set[str]:
    modifier = node.modifier
    if modifier is None:
        return left | right
    matching = modifier.matching
    if matching is not None:
        named = set(matching.labels)
        on = str(matching).startswith("on")
        assert named <= (left & right if on else left | right), f"{node.prettify()}: cannot match on {named}"
    extra = set(modifier.group_labels or ())
    assert extra <= left | right, f"{node.prettify()}: no label {extra} to take over"
    if "ManyToOne" in str(modifier.card):
        return left | extra
    if "OneToMany" in str(modifier.card):
        return right | extra
    return left | right if str(node.op) == "or" else left


def _selections(node: Any, functions: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    match type(node).__name__:
        case "VectorSelector":
            yield node.name, functions
        case "MatrixSelector":
            yield from _selections(node.vector_selector, functions)
        case "SubqueryExpr" | "ParenExpr" | "UnaryExpr" | "AggregateExpr":
            yield from _selections(node.expr, functions)
        case "Call":
            for argument in node.args:
                yield from _selections(argument, (*functions, node.func.name))
        case "BinaryExpr":
            yield from _selections(node.lhs, functions)
            yield from _selections(node.rhs, functions)
