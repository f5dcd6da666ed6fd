"""Repetition of a run's committed rounds."""
