"""Small layers and models to hand in at the front door."""

from __future__ import annotations

import torch
from oracles import draw
from torch import nn

from sensitivity.layers import TemporalAttention

TOKENS = draw(2, 5, 8)


def temporal(**options) -> TemporalAttention:
    torch.manual_seed(0)
    return TemporalAttention(8, 2, **options).double().eval()


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).double().eval()


class Reader(nn.Module):
    """Integer ids, embedded and encoded."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.embedding, self.encoder = nn.Embedding(10, 8), encoder()

    def forward(self, ids):
        return self.encoder(self.embedding(ids))
