"""What a run leaves to go on from: states, checkpoints, journal, spool, message trace."""
