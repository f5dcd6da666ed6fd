"""Endpoints, listeners and connections for envelopes, and the kernel's counters of them."""
