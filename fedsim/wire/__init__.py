"""Messages and their cost: schemas, codecs, envelopes, state files, the ledger."""
