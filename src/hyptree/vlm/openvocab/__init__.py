"""Segmentation and detection of classes that are named by text, on the patches of a CLIP.

segmenter.py    CLIP, class names and a head: one map of logits per class; large pictures by windows
cost_volume.py  the head: similarities of patches and classes, aggregated and up-sampled; its loss
detector.py     boxes of any detector of the library, named by text
settings.py     what a recipe of the task ``openvocab`` may say

Training is in hyptree/train (tasks/openvocab*.py); numbers of seen and unseen classes and panoptic
maps are in hyptree/evaluate (openvocab*.py, panoptic*.py).
"""
