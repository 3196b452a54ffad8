"""Everything that derives from the catalogue and the settings: rules, dashboards, chart files, metrics table.

The files are generated and committed; ``check`` tells which of them no longer are what would be written.
"""

from __future__ import annotations

import difflib
import itertools
from pathlib import Path

from gradexporter.bundle import readme, rules
from gradexporter.config import Config, GradexporterError

PARTS = ("rules", "dashboards", "chart", "readme")
"""What can be written alone: the rule file, the dashboards, the chart's copies of both, the metrics table."""

README = "README.md"
CHART_FILES = "helm/gradexporter/files"

_HINT_LINES = 12


class BundleError(GradexporterError):
    """A part of the bundle cannot be written; the text says what is missing."""


def generate(config: Config | None = None, only: str | None = None) -> dict[str, str]:
    """Text of every generated file, by its path from the root of the repository.

    The metrics table is not a file but a part of one: ``write`` and ``check`` put it into the README.
    Raises an error that is also an ImportError, naming the extra, where dashboards are asked for and their
    library is missing.
    """
    settings = config or Config()
    files: dict[str, str] = {}
    if only in (None, "rules", "chart"):
        files["alerts/rules.yaml"] = rules.render(settings.alerts)
    if only in (None, "dashboards", "chart"):
        from gradexporter.bundle.dashboards import render  # needs an extra that rules do not

        files.update({f"grafana/{name}": text for name, text in render(settings).items()})
    copies = {f"{CHART_FILES}/{Path(path).name}": text for path, text in files.items()}
    if only == "chart":
        return copies
    return {**files, **copies} if only is None else files


def write(root: Path, only: str | None = None, config: Config | None = None) -> list[str]:
    """Writes the files under ``root`` and returns the paths of those that changed."""
    changed = []
    for path, text in _wanted(root, only, config).items():
        target = root / path
        if not target.exists() or target.read_text() != text:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            changed.append(path)
    return changed


def check(root: Path, only: str | None = None, config: Config | None = None) -> list[str]:
    """What is stale under ``root``: one entry a file, its path and then how it differs."""
    stale = []
    for path, text in _wanted(root, only, config).items():
        target = root / path
        if not target.exists():
            stale.append(f"{path}\n  does not exist")
        elif (found := target.read_text()) != text:
            stale.append("\n".join((path, *_difference(found, text))))
    return stale


def _wanted(root: Path, only: str | None, config: Config | None) -> dict[str, str]:
    if only is not None and only not in PARTS:
        raise BundleError(f"there is no part {only!r} of the bundle; the parts are {', '.join(PARTS)}")
    wanted = generate(config, only)
    page = root / README
    if only == "readme" or (only is None and page.exists()):
        try:
            wanted[README] = readme.splice(page.read_text())
        except (OSError, ValueError) as error:
            raise BundleError(f"the metrics table has no place in {page}: {error}") from error
    return wanted


def _difference(found: str, wanted: str) -> list[str]:
    lines = difflib.unified_diff(found.splitlines(), wanted.splitlines(), "found", "wanted", n=0, lineterm="")
    changes = [f"  {line[:160]}" for line in itertools.islice(lines, 2, None) if not line.startswith("@@")]
    more = len(changes) - _HINT_LINES
    return [*changes[:_HINT_LINES], f"  ... and {more} more lines"] if more > 0 else changes
