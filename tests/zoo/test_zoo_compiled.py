"""Many architectures under torch.compile: no graph added or broken, measured right, and trained as alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.zoo.specimen import Specimen
from tests.zoo.trials import Run, right, same, train
from tests.zoo.wraps import compilations, compiled
from tests.zoo.zoo import QUICKLY_COMPILED, SPECIMENS, UNCOMPILABLE, UNGRADED_CALLS

pytestmark = pytest.mark.timeout(1800)

every = pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=str)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    import torch._inductor.config as inductor

    torch.set_num_threads(1)
    with inductor.patch(fallback_random=True):  # dropout as in eager code
        yield
    torch._dynamo.reset()


def both(specimen: Specimen, backend: str) -> tuple[Run, Run] | None:
    """Alone and watched, when torch can compile it; asserts that no graph is added or broken."""
    if specimen.name in UNCOMPILABLE:
        with pytest.raises(RuntimeError):
            train(specimen, compiled(backend))
        return None
    alone = train(specimen, compiled(backend))
    before = compilations()
    watched = train(specimen, compiled(backend), watched=True)
    after = compilations()

    assert after == before
    assert watched.said <= alone.said
    return alone, watched


def compiled_right(specimen: Specimen, backend: str) -> None:
    runs = both(specimen, backend)
    if runs is not None:
        alone, watched = runs
        same(watched, alone)
        right(watched, alone)
        if specimen.name not in UNGRADED_CALLS:
            right(watched, train(specimen, witnessed=True), steps=(0,), columns="activation", tolerance=1e-3)


@pytest.mark.parametrize("name", QUICKLY_COMPILED)
def test_compiled_models_are_measured_and_trained_as_alone(name: str) -> None:
    compiled_right(SPECIMENS[name], "aot_eager")


@pytest.mark.slow
@every
def test_all_compiled_models_are_measured_and_trained_as_alone(specimen: Specimen) -> None:
    compiled_right(specimen, "aot_eager")


@pytest.mark.slow
@every
def test_models_compiled_by_inductor_are_trained_as_alone_and_measured_where_fusion_leaves_outputs(
    specimen: Specimen,
) -> None:
    runs = both(specimen, "inductor")
    if runs is not None:
        alone, watched = runs
        same(watched, alone)
        right(watched, alone)
        if specimen.name not in UNGRADED_CALLS:
            bare = train(specimen, witnessed=True)
            right(watched, bare, steps=(0,), columns="activation", tolerance=1e-3, absent=True)
