"""Networks with a place for an SVD layer."""
