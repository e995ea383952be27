"""HELM: causal language models on the hyperboloid, as Hugging Face models."""
