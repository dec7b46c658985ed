"""minifloat."""
