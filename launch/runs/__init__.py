"""Writing, reading and resuming of run folders."""
