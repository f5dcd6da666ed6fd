"""Readable pages of runs: of one run (fedsim report) and of several runs side by side (fedsim compare)."""
