"""The version of fedsim; setup.cfg reads it here."""

__version__ = "0.1.0"
