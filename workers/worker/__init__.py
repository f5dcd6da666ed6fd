"""The worker: receives tasks, computes them, and replies."""
