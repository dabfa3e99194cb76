"""The canonical description of one multi-head softmax attention layer."""

from sensitivity.attention.layer import SoftmaxAttention

__all__ = ["SoftmaxAttention"]
