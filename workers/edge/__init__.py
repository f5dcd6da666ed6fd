"""The edge server's role: a coordinator towards its clients' workers, a worker towards the root."""
