"""How many numbers a computation holds in one tensor."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the most numbers that any tensor held while it was on."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, torch.Tensor):
                held = value.untyped_storage().nbytes() // value.element_size()
                self.numbers = max(self.numbers, min(value.numel(), held))  # neither all of a part's whole nor a repeat
        return found
