"""The commands of the command line: one module for each, or for several related ones."""
