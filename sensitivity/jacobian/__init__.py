"""How Jacobian blocks and their norms are computed: in closed form, or by automatic differentiation."""
