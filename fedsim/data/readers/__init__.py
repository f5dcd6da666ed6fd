"""One file format each: files to arrays."""
