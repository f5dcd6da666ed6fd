"""Process roles (coordinator, worker, edge server) and their connections, independent of any algorithm."""
