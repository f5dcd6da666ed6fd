"""Results of runs as pages, tables and files, of one run or of several side by side, and their checks."""
