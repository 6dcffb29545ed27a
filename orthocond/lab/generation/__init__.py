"""Training of GANs (paper: section 6.2)."""
