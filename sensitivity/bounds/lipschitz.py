r"""The local Lipschitz constant of a layer, :math:`|J|_2` over all tokens at once, and its :math:`\sqrt T` bound."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sensitivity.attention import SoftmaxAttention
from sensitivity.bounds.cloud import BallConstants
from sensitivity.bounds.layer import LayerConstants

STEPS = 30


def upper(constants: LayerConstants, ball: BallConstants, residual: float | int, length: int) -> float:
    r""":math:`|\gamma| + \sum_h R^2 \kappa_h + \sqrt T \sum_h (|M_h| + w_h \rho_h)`.

    The value and key paths of a head map :math:`(y_j)` to :math:`\sum_j a_{ij} (M y_j + (u_j - \bar u_i) w \cdot y_j)`,
    at most :math:`(|M| + w \rho) (\sum_j a_{ij} |y_j|^2)^{1/2}`; summed over i, no column of the weights exceeds T.
    """
    paths = constants.operator_sizes + ball.gradient * ball.radius
    return float(abs(residual)) + float(ball.query) + math.sqrt(length) * float(paths.sum())


def measured(
    attention: SoftmaxAttention,
    tokens: Float[Tensor, "sample time dim"],
    seen: Bool[Tensor, "sample time"],
    steps: int = STEPS,
    seed: int = 0,
) -> Float[Tensor, " sample"]:
    """Largest singular value of each sample's whole Jacobian by power iteration (from below), padding left out."""
    mask = seen[..., None].to(tokens.dtype)

    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(tokens.shape, generator=generator, dtype=tokens.dtype).to(tokens.device) * mask
    size = tokens.new_zeros(tokens.shape[0])
    with torch.enable_grad():
        inputs = tokens.detach().requires_grad_(True)
        output = attention(inputs) * mask
        cotangent = torch.zeros_like(output, requires_grad=True)
        # the pullback is linear in its cotangent, so its own derivative is the Jacobian itself
        (pullback,) = torch.autograd.grad(output, inputs, cotangent, create_graph=True)
        for _ in range(steps):
            length = torch.linalg.vector_norm(vector, dim=(1, 2), keepdim=True)
            vector = vector / torch.where(length > 0, length, 1.0)
            (image,) = torch.autograd.grad(pullback, cotangent, vector, retain_graph=True)
            size = torch.linalg.vector_norm(image, dim=(1, 2))
            (vector,) = torch.autograd.grad(output, inputs, image, retain_graph=True)
            vector = vector * mask
    return size
