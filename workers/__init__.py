"""Process roles: coordinator, worker, and what connects them. Knows no algorithm by name."""
