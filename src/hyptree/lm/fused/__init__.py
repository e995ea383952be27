"""What the parts of a HELM do on a GPU: kernels joined with the products around them."""
