"""Segmentation, detection and panoptic maps of classes that are named by text, on the patches of a CLIP.

segmenter.py    CLIP, class names and a head: one map of logits per class
cost_volume.py  the head: similarities of patches and classes, aggregated and up-sampled
sliding.py      large pictures by overlapping windows and one look at the whole
detector.py     boxes of any detector of the library, named by text
panoptic.py     instances and the semantic map joined into one
scores.py       numbers for seen and unseen classes
settings.py     what a recipe of the task ``openvocab`` may say
"""
