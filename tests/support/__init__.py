"""Helpers of the tests, by what a test needs.

harness       short runs of an algorithm through the real coordinator in this process, and the same by hand
endpoints     endpoints for such runs: any order of arrival, counted bytes, two real workers over ZeroMQ
commands      `fedsim ...` as a process: until it ends (fedsim), or while it runs (start, Command)
relay         a TCP relay that counts bytes and delays, slows, silences, damages or cuts connections
reproducible  what of metrics.jsonl must be equal in every way to carry out a run; fresh forked processes
trials        faults, outcomes and comparisons of the trials of faults (tests.chaos, tests.chaos_remote)
kept_runs     folders of short runs, commands that look at them, and damage to their files

Elsewhere: tests/simulation is the coordinator in virtual time, tests/golden the recorded digests, and the
conftest.py of a folder has fixtures for that folder alone. tests/chaos.py and tests/chaos_remote.py are
commands.
"""
