"""Runs on an engine that users have already: it places, pins and starts; fedsim computes and measures.

An engine starts the coordinator with --remote-workers, and on every machine a node agent
(launch/processes/node.py) with the run's join file. No tensor travels through the engine, and results and
algorithm bytes are those of a run on one machine.
"""
