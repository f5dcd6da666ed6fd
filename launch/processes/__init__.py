"""Worker processes, and the fork server and supervisor that start and end them."""
