"""Recorded digests of short runs of every algorithm, and the command that makes and compares them."""
