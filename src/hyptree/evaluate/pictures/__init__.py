"""Metrics of pictures: segments, objects, panoptic maps, clusters against masks."""
