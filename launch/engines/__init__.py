"""Runs on a user's engine, such as Slurm: it places, pins and starts processes; fedsim computes and measures.

An engine starts the coordinator with --remote-workers, and on every machine a node agent
(launch/processes/node.py) with the run's join file. The engine transfers no tensors. The results and the
algorithm bytes are equal to those of a run on one machine.
"""
