"""Training of classifiers with an SVD layer (paper: section 6.1)."""
