"""The command line, run folders, their reports, sweeps, and the processes of a run."""

import time

PROGRAM_START = time.time()
"""When the command line began, before its imports."""
