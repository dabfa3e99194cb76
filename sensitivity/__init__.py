"""How much every output time step of a temporal attention model depends on every input time step."""

from sensitivity import adapters as _adapters  # registers the layers that can be described
from sensitivity.attention import SoftmaxAttention
from sensitivity.errors import InputError, RunError, SensitivityError, SensitivityWarning

__all__ = ["InputError", "RunError", "SensitivityError", "SensitivityWarning", "SoftmaxAttention"]
__version__ = "0.1.0"
