"""Worker processes: the fork server, and the supervisor that starts and ends them."""
