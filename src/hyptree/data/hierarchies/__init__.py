"""Hierarchies as data: edge lists, WordNet, HyperLex, chains of captions."""
