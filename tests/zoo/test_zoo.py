"""Many architectures, each trained for a few steps: what is published is right, and nothing else changes."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch

from gradexporter.hooks import find_layers
from tests.zoo.specimen import Specimen
from tests.zoo.trials import Run, right, same, train
from tests.zoo.wraps import Wrap, checkpointed, reentrant
from tests.zoo.zoo import DISTINCT, SPECIMENS, UNCHECKPOINTABLE

every = pytest.mark.parametrize("specimen", SPECIMENS.values(), ids=str)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@functools.cache
def witnessed(specimen: Specimen) -> Run:
    """The specimen trained bare, with what hooks of the test's own read."""
    return train(specimen, witnessed=True)


def test_the_zoo_is_large() -> None:
    assert len(SPECIMENS) > 150


def cannot(specimen: Specimen, wrap: Wrap) -> None:
    """Asserts that it fails without us."""
    with pytest.raises((RuntimeError, TypeError, ValueError)):
        train(specimen, wrap)


@pytest.mark.matrix("zoo")
@every
def test_each_layer_is_measured_right_and_training_goes_on_as_alone(specimen: Specimen) -> None:
    alone = train(specimen)
    watched = train(specimen, watched=True)

    same(watched, alone)
    right(watched, witnessed(specimen))
    assert watched.said <= alone.said
    assert all(watched.signals[signal] for signal in ("gradient", "pre_clip", "activation", "loss"))


@every
def test_every_trainable_parameter_belongs_to_exactly_one_layer(specimen: Specimen) -> None:
    model = specimen.model()

    owners = Counter(id(parameter) for layer in find_layers(model) for parameter in layer.parameters)

    assert owners == {id(parameter): 1 for parameter in model.parameters()}


def checkpointed_right(specimen: Specimen) -> None:
    if specimen.name in UNCHECKPOINTABLE:
        cannot(specimen, checkpointed)
        return
    alone = train(specimen, checkpointed)
    watched = train(specimen, checkpointed, watched=True)

    same(watched, alone)
    right(watched, alone)
    right(watched, witnessed(specimen))
    assert watched.said <= alone.said


@pytest.mark.parametrize("name", DISTINCT)
def test_checkpointed_blocks_are_measured_once_under_the_same_names(name: str) -> None:
    checkpointed_right(SPECIMENS[name])


@pytest.mark.slow
@every
def test_all_checkpointed_blocks_are_measured_once_under_the_same_names(specimen: Specimen) -> None:
    checkpointed_right(specimen)


@pytest.mark.slow
@every
def test_reentrant_checkpoints_are_measured_once_under_the_same_names(specimen: Specimen) -> None:
    if specimen.name in UNCHECKPOINTABLE:
        cannot(specimen, reentrant)
        return
    alone = train(specimen, reentrant)
    watched = train(specimen, reentrant, watched=True)

    same(watched, alone)
    right(watched, alone)
    # A block whose inputs need no gradient has none itself, so that the next step is another.
    right(watched, witnessed(specimen), steps=(0,), columns="activation")
    assert watched.said <= alone.said
