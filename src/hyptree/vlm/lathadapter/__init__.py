"""LatHAdapter: a latent hierarchy of class, attribute and picture for few-shot learning."""
