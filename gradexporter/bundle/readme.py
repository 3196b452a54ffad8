"""The metrics table of the README, between its two markers."""

from __future__ import annotations

from gradexporter.metrics import CATALOG, IDENTITY_LABELS, Section

BEGIN = "<!-- metrics:begin -->"
END = "<!-- metrics:end -->"


def table() -> str:
    """Every family of the catalogue as Markdown, one table a section."""
    identity = " and ".join(f"`{label}`" for label in IDENTITY_LABELS)
    lines = [
        f"Every series of this table carries {identity} as well. `/metrics` and `/metrics/core` also hold the",
        "`process_*` and `python_*` series of prometheus_client, which carry neither.",
        "",
    ]
    for section in Section:
        lines += [f"**{section.value}**", "", "| name | type | labels | meaning |", "|---|---|---|---|"]
        for spec in CATALOG:
            if spec.section is section:
                labels = ", ".join(f"`{label}`" for label in spec.labels)
                lines.append(f"| `{spec.name}` | {spec.kind.value} | {labels} | {spec.help} |")
        lines.append("")
    return "\n".join(lines)


def splice(text: str) -> str:
    """The page with the table between its markers renewed; ValueError if a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"it has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"
