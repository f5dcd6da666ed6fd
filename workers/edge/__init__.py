"""The edge server, which acts as a coordinator for its clients' workers and as a worker for the root."""
