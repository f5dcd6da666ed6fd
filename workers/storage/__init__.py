"""The files from which a run resumes: states, checkpoints, journal, spool, message trace.

Functions here raise DiskError if a file cannot be read or written, and WireError if its content is damaged or
belongs to another run, client or version.
"""
