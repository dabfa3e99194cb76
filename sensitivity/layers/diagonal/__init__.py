r"""What may be done to the diagonal of an attention matrix, behind one interface.

With logits :math:`s_{ij}`, weights :math:`a_{ij}` and the four paths of the block Jacobian (residual, value, key,
query), these regularisers act on the pairs :math:`(i, i)`:

==========================  ===========================  ==============  ============================================
regulariser                 acts on                      acts in         effect on the diagonal block
==========================  ===========================  ==============  ============================================
``DiagonalMask``            logit to :math:`-\infty`     train and eval  value and key paths vanish; query path stays
``DiagonalPenalty``         logit plus a constant        train and eval  all paths stay; :math:`a_{ii}` changes
``DiagonalLearnedPenalty``  logit plus a number for      train and eval  the same, head by head
                            each head, learned
``DiagonalLengthPenalty``   logit plus a number that     train and eval  the same; value and key paths keep their
                            grows with the keys                          size where others lose it with T
``DiagonalDropout``         logit or weight, sampled     train           see the class
==========================  ===========================  ==============  ============================================

None of them touches the residual path; ``sensitivity.layers.ResidualGate`` does. Source of mask, penalty and dropout:
arXiv 2602.10956 and its public code.
"""

from sensitivity.layers.diagonal.base import Diagonal
from sensitivity.layers.diagonal.config import diagonal_from_config
from sensitivity.layers.diagonal.dropout import DiagonalDropout
from sensitivity.layers.diagonal.mask import DiagonalMask
from sensitivity.layers.diagonal.penalty import DiagonalLearnedPenalty, DiagonalLengthPenalty, DiagonalPenalty

__all__ = [
    "Diagonal",
    "DiagonalDropout",
    "DiagonalLearnedPenalty",
    "DiagonalLengthPenalty",
    "DiagonalMask",
    "DiagonalPenalty",
    "diagonal_from_config",
]
