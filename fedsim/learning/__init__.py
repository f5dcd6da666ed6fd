"""Local learning: parameters as one vector, models, solvers, curvature."""
