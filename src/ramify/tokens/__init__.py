"""Token reduction for vision transformers: patch a model, read what was merged, take the patch away again."""
