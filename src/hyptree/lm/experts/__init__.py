"""MICE, the mixture of curvature experts: networks, routing, and the grouped products that a GPU wants."""
