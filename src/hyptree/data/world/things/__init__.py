"""Blueprints of what stands in the built-in world, and what stands behind it."""
