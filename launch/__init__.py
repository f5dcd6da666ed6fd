"""The command line, run folders, their reports, sweeps, and the processes of a run.

A function of this package may raise the errors of fedsim.errors: UsageError for what a user asks for,
DataError for a file that is missing or damaged, DiskError for the disk. Its docstring names an error where
that says more.
"""

import time

PROGRAM_START = time.time()
"""The start of the command line, before its imports, in seconds since the epoch."""
