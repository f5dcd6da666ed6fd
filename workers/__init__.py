"""Process roles (coordinator, worker) and their connections, independent of any algorithm."""
