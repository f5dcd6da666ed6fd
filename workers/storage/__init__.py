"""The files from which a run resumes: states, checkpoints, journal, spool, message trace."""
