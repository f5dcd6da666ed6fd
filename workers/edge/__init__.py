"""The edge server: a coordinator for its clients' workers, and a worker for the root."""
