"""Run folders: written, read back, resumed."""
