"""Runs as pages for people: one run (fedsim report) and several side by side (fedsim compare)."""
