"""Families of models whose tokens can be reduced, one file each; ``adapter.py`` says what a family tells of itself."""
