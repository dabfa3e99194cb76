"""Layers of other libraries described as softmax attention, and what reaches them when a model runs."""

from sensitivity.adapters.capture import Captured, attention_layers, capture, capture_input
from sensitivity.adapters.outputs import as_sequence_function, select_output
from sensitivity.adapters.submodule import embedding_function, submodule_function
from sensitivity.adapters.torch_attention import describe

__all__ = [
    "Captured",
    "as_sequence_function",
    "attention_layers",
    "capture",
    "capture_input",
    "describe",
    "embedding_function",
    "select_output",
    "submodule_function",
]
