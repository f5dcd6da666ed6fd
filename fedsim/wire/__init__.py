"""Messages and their cost: schemas, codecs, envelopes, state files, the ledger.

Functions that read the bytes of another process raise WireError if the bytes are not valid. If a function has
the parameter `owner`, the text of the error begins with `owner`.
"""
