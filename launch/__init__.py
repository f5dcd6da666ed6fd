"""The command line, run folders, their reports, sweeps, and the processes of a run.

Functions of this package may raise the errors of fedsim.errors: UsageError for a wrong request of the user,
DataError for a missing or damaged file, DiskError for a failure of the disk. Docstrings name errors only
where that adds information.
"""

import time

PROGRAM_START = time.time()
"""The time at which the program started, before its imports, in seconds since the epoch."""
