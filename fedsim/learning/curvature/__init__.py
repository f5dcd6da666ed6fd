"""Curvature of a summed loss: the diagonal and full generalised Gauss-Newton matrix, the empirical Fisher."""
