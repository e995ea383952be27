"""Latent attention of HELM-MICE: projections and the cache."""
