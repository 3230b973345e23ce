"""The transitions of the tiers as machine code over NumPy arrays, updated in place."""
