"""A small CLIP of our own for the built-in world, flat or hyperbolic, and what it is trained with."""
