"""A run's committed rounds, computed again."""
