"""Algorithms that none of the five papers has or compares with. A file here is in the registry without a line
elsewhere; it is written like a user's own file, with the public names of `fedsim`, and nothing imports it.
"""
