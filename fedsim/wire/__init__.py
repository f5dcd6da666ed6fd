"""Messages and their cost: schemas, codecs, envelopes, state files, the ledger.

Whatever reads bytes that another process has written raises WireError if they are not as they should be. With
a parameter `owner`, the text of the error begins with it.
"""
