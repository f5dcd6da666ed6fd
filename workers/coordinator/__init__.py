"""The coordinator's parts: what goes out, who is there, what is folded, what is reported."""
