"""The command line, run folders, their reports, sweeps, and the processes of a run.

Functions of this package may raise the errors of fedsim.errors: UsageError for an invalid request, DataError
for a missing or damaged file, and DiskError for a failed disk operation. Docstrings name errors only where
that adds information.
"""

import time

PROGRAM_START = time.time()
"""The time at which the program started, before its imports, in seconds since the epoch."""
