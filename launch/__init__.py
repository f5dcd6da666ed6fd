"""People: command line, process supervision, run folder, display."""
