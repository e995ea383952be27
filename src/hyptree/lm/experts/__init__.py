"""MICE, the mixture of curvature experts: networks and routing; what runs them is ``hyptree.ops.experts``."""
