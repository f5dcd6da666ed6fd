"""The files from which a run resumes: states, checkpoints, journal, spool, message trace.

Whatever reads or writes a file here raises DiskError if that is not possible, and WireError if the content is
damaged or belongs to something else.
"""
