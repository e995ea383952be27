"""Data: hierarchies as edge lists and closures."""

from ramify.data.hierarchy import Hierarchy, read_hierarchy, transitive_closure

__all__ = ["Hierarchy", "read_hierarchy", "transitive_closure"]
