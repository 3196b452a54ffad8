"""The series budget: what stays named, what is folded, what is counted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest

from gradexporter.exposure import LAYER_FAMILIES, Exposure, View, blocks
from gradexporter.records import (
    Diagnosis,
    Finding,
    FindingKind,
    FirstNonfinite,
    Identity,
    LayerStats,
    LayerTable,
    Quantity,
    SelfStats,
    Severity,
    Shape,
    Snapshot,
    State,
    StepReport,
)
from gradexporter.sinks.prometheus import PrometheusCollector
from gradexporter.tally import Tally


def rows(count: int, *odd: LayerStats) -> list[LayerStats]:
    """``count`` calm layers in ten blocks, some of them replaced."""
    instead = {row.layer: row for row in odd}
    names = [f"encoder.{index * 10 // count}.layer{index}" for index in range(count)]
    calm = {"gradient_norm": 1.0, "spike_ratio": 1.0, "gradient_nonfinite": 0.0, "activation_nonfinite": 0.0}
    return [instead.get(name, LayerStats(layer=name, **calm)) for name in names]


def snapshot(layers: Sequence[LayerStats], rank: int = 0, **report: object) -> Snapshot:
    tally = Tally(Identity(run_id="r", rank=rank), clock=lambda: 100.0)
    return tally.add(
        StepReport(step=1, layers=LayerTable.from_rows(layers), **report),  # type: ignore[arg-type]
        SelfStats(),
    )


def shown(view: View, column: str) -> dict[str, float]:
    table = view.layer_totals if column.endswith("nonfinite") else view.layers
    pair = table.column(column)
    assert pair is not None
    return {name: value for name, value, seen in zip(table.names, *pair, strict=True) if seen}


# -- which layers are named -----------------------------------------------------------------------


def test_all_layers_are_named_while_the_budget_lasts() -> None:
    view = Exposure(2000).view(snapshot(rows(150)))

    assert len(view.layers.names) == 150
    assert view.rows == tuple((name,) for name in view.layers.names)
    assert view.series_dropped == 0


def test_beyond_the_budget_the_worst_stay_named_and_all_are_in_a_block() -> None:
    worst = LayerStats(layer="encoder.9.layer4999", gradient_norm=50.0, spike_ratio=50.0)
    second = LayerStats(layer="encoder.0.layer7", gradient_norm=9.0, spike_ratio=9.0)

    view = Exposure(2000).view(snapshot(rows(5000, worst, second)))

    assert {worst.layer, second.layer} <= set(view.layers.names)
    assert view.layers.names[-10:] == tuple(f"encoder.{index}.*" for index in range(10))
    assert len(view.layers.names) <= 150
    assert view.series_dropped == (5000 - (len(view.layers.names) - 10)) * LAYER_FAMILIES


@pytest.mark.parametrize(("norms", "asked", "named"), [("share", True, 3), ("share", False, 0), ("global", True, 0)])
def test_a_healthy_rank_above_0_names_the_layers_of_a_share_that_was_asked_for(
    norms: str, asked: bool, named: int
) -> None:
    tally = Tally(Identity(run_id="r", rank=1), clock=lambda: 100.0)
    report = StepReport(step=1, state=State.HEALTHY, layers=LayerTable.from_rows(rows(3)))

    view = Exposure(2000).view(tally.add(report, SelfStats(norms=norms, layer_shares=asked)))

    assert len(view.layers.names) == named


def test_noise_does_not_change_who_is_named() -> None:
    """Named by noise, every layer would be named in turn, and each is a dozen new series."""
    random = np.random.default_rng(1)
    exposure = Exposure(2000)

    def names() -> tuple[str, ...]:
        noisy = [dataclasses.replace(row, spike_ratio=random.uniform(0.3, 2.9)) for row in rows(1000)]
        return exposure.view(snapshot(noisy)).layers.names

    assert names() == names()


@pytest.mark.parametrize(
    "verdict",
    [
        {"first_nonfinite": FirstNonfinite(step=1, layer="encoder.9.layer999", quantity=Quantity.GRADIENT)},
        {
            "diagnosis": Diagnosis(
                shape=Shape.BAD_BATCH, severity=Severity.WARNING, layer="encoder.9.layer999", since_step=1
            )
        },
        {
            "findings": (
                Finding(
                    kind=FindingKind.DEAD_LAYER,
                    severity=Severity.WARNING,
                    step=1,
                    layer="encoder.9.layer999",
                    quantity=Quantity.GRADIENT,
                ),
            )
        },
    ],
    ids=lambda verdict: next(iter(verdict)),
)
def test_a_layer_that_the_verdict_names_is_named_even_when_all_are_lost(verdict: dict[str, object]) -> None:
    lost = [dataclasses.replace(row, spike_ratio=math.nan, gradient_nonfinite=4.0) for row in rows(1000)]

    assert "encoder.9.layer999" in Exposure(2000).view(snapshot(lost, **verdict)).layers.names


def test_a_layer_that_was_not_finite_once_stays_named() -> None:
    lost = LayerStats(layer="encoder.9.layer999", activation_nonfinite=1.0)
    tally = Tally(Identity(run_id="r"), clock=lambda: 100.0)
    tally.add(StepReport(step=1, layers=LayerTable.from_rows(rows(1000, lost))), SelfStats())
    later = tally.add(StepReport(step=2, layers=LayerTable.from_rows(rows(1000))), SelfStats())

    assert lost.layer in Exposure(2000).view(later).layers.names


@pytest.mark.parametrize("state", [None, State.WARMING_UP, State.HEALTHY])
def test_a_healthy_rank_other_than_0_names_no_layer(state: State | None) -> None:
    view = Exposure(2000).view(snapshot(rows(20), rank=3, state=state))

    assert (view.layers.names, view.layer_totals.names, view.rows) == ((), (), ())


@pytest.mark.parametrize("state", [State.SPIKE, State.CASCADE, State.NONFINITE])
def test_a_rank_in_trouble_names_its_layers(state: State) -> None:
    assert len(Exposure(2000).view(snapshot(rows(20), rank=3, state=state)).layers.names) == 20


def test_what_is_dropped_is_the_same_in_trouble_and_in_health() -> None:
    """A counter that fell back with every recovery would count each spike anew."""
    exposure = Exposure(2000)
    well = exposure.view(snapshot(rows(1000), rank=3, state=State.HEALTHY))
    ill = exposure.view(snapshot(rows(1000), rank=3, state=State.SPIKE))

    assert well.series_dropped == ill.series_dropped > 0


def test_a_view_depends_on_its_snapshot_alone() -> None:
    """Two scrapers, or a curl between two scrapes, see what one would have seen."""
    first, second = snapshot(rows(1000)), snapshot(rows(300))
    busy, fresh = Exposure(2000), Exposure(2000)
    for other in (first, second, first):
        busy.view(other)

    mine, theirs = busy.view(second), fresh.view(second)
    assert mine.layers.names == theirs.layers.names
    assert mine.series_dropped == theirs.series_dropped


# -- how rows become one --------------------------------------------------------------------------


def folded(*layers: LayerStats) -> View:
    """All of them in one block, none of them named."""
    return Exposure(0).view(snapshot([*layers, LayerStats(layer="other.x.y")]))


def test_norms_fold_by_root_of_the_sum_of_squares_and_maxima_by_maximum() -> None:
    view = folded(
        LayerStats(layer="a", gradient_norm=3.0, gradient_max_abs=2.0, gradient_nonfinite=1.0, spike_ratio=7.0),
        LayerStats(layer="b", gradient_norm=4.0, gradient_max_abs=5.0, gradient_nonfinite=2.0),
    )

    assert shown(view, "gradient_norm") == {"*": 5.0}
    assert shown(view, "gradient_max_abs") == {"*": 5.0}
    assert shown(view, "spike_ratio") == {"*": 7.0}
    assert shown(view, "gradient_nonfinite") == {"*": 3.0}


@pytest.mark.parametrize("column", ["gradient_norm", "gradient_max_abs", "activation_rms", "parameter_norm"])
def test_nan_of_one_layer_is_nan_of_its_block(column: str) -> None:
    view = folded(LayerStats(layer="a", **{column: math.nan}), LayerStats(layer="b", **{column: math.inf}))

    assert math.isnan(shown(view, column)["*"])


def test_a_norm_folds_without_overflow_and_infinity_stays_infinite() -> None:
    large = folded(LayerStats(layer="a", gradient_norm=3e200), LayerStats(layer="b", gradient_norm=4e200))

    assert shown(large, "gradient_norm") == {"*": pytest.approx(5e200)}
    assert shown(folded(LayerStats(layer="a", gradient_norm=math.inf)), "gradient_norm") == {"*": math.inf}
    assert shown(folded(LayerStats(layer="a", gradient_norm=0.0)), "gradient_norm") == {"*": 0.0}


def test_a_block_shows_nothing_that_none_of_its_layers_has() -> None:
    names = [f"{block}.layer{index}" for block in ("left", "right") for index in range(100)]
    layers = [LayerStats(layer=name, gradient_norm=1.0 if name.startswith("left") else None) for name in names]

    view = Exposure(500).view(snapshot(layers))

    assert view.layers.names[-2:] == ("left.*", "right.*")
    assert shown(view, "gradient_norm")["left.*"] == 10.0
    assert "right.*" not in shown(view, "gradient_norm")


def test_counters_of_a_block_never_fall_while_the_named_layers_change() -> None:
    tally = Tally(Identity(run_id="r"), clock=lambda: 100.0)
    exposure = Exposure(2000)
    blocks_seen: list[float] = []
    named: set[tuple[str, ...]] = set()
    for step in range(1, 6):
        odd = [LayerStats(layer=f"encoder.9.layer{999 - i}", gradient_nonfinite=2.0) for i in range(step * 30)]
        view = exposure.view(
            tally.add(StepReport(step=step, layers=LayerTable.from_rows(rows(1000, *odd))), SelfStats())
        )
        blocks_seen.append(shown(view, "gradient_nonfinite")["encoder.9.*"])
        named.add(view.layers.names)

    assert blocks_seen == [60.0, 180.0, 360.0, 560.0, 760.0]
    assert len(named) > 1


def test_a_layer_that_two_optimizers_share_is_one_series() -> None:
    """Say weights under one and biases under the other: two rows of one name would fail the scrape."""
    tally = Tally(Identity(run_id="r"), clock=lambda: 100.0)
    for optimizer, norm in enumerate((3.0, 4.0)):
        layers = [
            LayerStats(layer="a", gradient_norm=norm, gradient_nonfinite=1.0),
            LayerStats(layer=f"own{optimizer}"),
        ]
        tally.add(StepReport(step=1, optimizer=optimizer, layers=LayerTable.from_rows(layers)), SelfStats())

    view = Exposure(2000).view(tally.snapshot)

    assert view.layers.names == view.layer_totals.names == ("a", "own0", "own1")
    assert shown(view, "gradient_norm") == {"a": 5.0}
    assert shown(view, "gradient_nonfinite") == {"a": 2.0}


def test_blocks_are_as_deep_as_they_may_be() -> None:
    names = ("a.0.x", "a.0.y", "a.1.x", "b.0.x", "head")
    assert blocks(names, 1) == ("*",) * 5
    assert blocks(names, 3) == ("a.*", "a.*", "a.*", "b.*", "head.*")
    assert blocks(names, 4) == ("a.0.*", "a.0.*", "a.1.*", "b.0.*", "head.*")
    assert blocks(("0", "1"), 9) == ("*", "*")
    assert blocks((), 9) == ()


# -- the whole budget -----------------------------------------------------------------------------

EVERYTHING = SelfStats(
    capture_every_steps=dict.fromkeys(("activation", "state"), 10),
    signal_available=dict.fromkeys(map(str, range(12)), True),
    failures=dict.fromkeys(map(str, range(12)), 1),
)


def full(layers: int, groups: int) -> Snapshot:
    """A rank that has every series there is."""
    stats = {
        name: 1.0
        for name in (field.name for field in dataclasses.fields(LayerStats))
        if name not in ("layer", "dtype_max", "execution_order")
    }
    values = {
        field.name: 1.0
        for field in dataclasses.fields(StepReport)
        if field.type in ("float | None", "int | None") and field.name != "step"
    }
    findings = tuple(
        Finding(kind=kind, severity=Severity.WARNING, step=1, quantity=Quantity.GRADIENT) for kind in FindingKind
    )
    tally = Tally(Identity(run_id="r", labels={"team": "x"}), clock=lambda: 100.0)
    tally.checkpoint(0)
    return tally.add(
        StepReport(
            **{
                **values,
                "step": 1,
                "last_healthy_step": 1,
                "layers": LayerTable.from_rows(
                    [LayerStats(layer=f"block{index % 40}.{index}", **stats) for index in range(layers)]
                ),
                "group_learning_rates": (0.1,) * groups,
                "findings": findings,
                "state": State.NONFINITE,
                "first_nonfinite": FirstNonfinite(step=1, layer="x", quantity=Quantity.LOSS),
            }
        ),
        EVERYTHING,
    )


def series(snapshot: Snapshot, max_series: int) -> int:
    return sum(len(family.samples) for family in PrometheusCollector(lambda: snapshot, max_series).collect())


@pytest.mark.parametrize("layers", [0, 151, 152, 5000])
@pytest.mark.parametrize("groups", [1, 3000])
@pytest.mark.parametrize("max_series", [200, 2000, 10_000])
def test_a_rank_never_exposes_more_than_its_budget(layers: int, groups: int, max_series: int) -> None:
    assert series(full(layers, groups), max_series) <= max_series


def test_parameter_groups_beyond_their_share_are_counted_too() -> None:
    view = Exposure(2000).view(full(layers=0, groups=3000))

    assert 0 < len(view.learning_rates) < 500
    assert view.series_dropped == 3000 - len(view.learning_rates)
