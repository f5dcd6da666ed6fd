"""Curvature of a summed loss: diagonal and full generalised Gauss-Newton matrix, empirical Fisher."""
