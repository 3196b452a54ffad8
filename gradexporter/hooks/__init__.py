"""What is watched: the hooks on a model, its optimizers and gradient scalers."""

from gradexporter.hooks.capture import Capture
from gradexporter.hooks.layers import Layer, find_layers

__all__ = ["Capture", "Layer", "find_layers"]
