"""Latent attention of HELM-MICE: projections, scores and the cache."""
