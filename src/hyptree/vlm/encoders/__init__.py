"""Encoders of pictures and texts from open_clip and transformers as one type, and their features."""
