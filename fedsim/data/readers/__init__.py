"""Readers, one module per file format, which convert files to arrays."""
