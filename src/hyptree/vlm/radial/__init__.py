"""Radial embeddings: reading and aligning the hierarchy inside encoders of text and pictures."""
