"""The derivations of the Jacobian of temporal attention, its bounds, and its law, as code that checks itself."""
