"""Curvature of a summed loss: the diagonal and the full generalised Gauss-Newton matrix, the empirical
Fisher."""
