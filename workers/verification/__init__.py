"""Verification: repetition of a run's committed rounds, and comparison with the run's results."""
