"""Runs on an engine, such as Slurm, which places, pins and starts the processes of fedsim.

An engine starts the coordinator with --remote-workers, and a node agent (launch/processes/node.py) with the
run's join file on every machine. The engine transfers no tensors. The results and the algorithm bytes are
equal to those of a run on one machine.
"""
