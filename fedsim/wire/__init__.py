"""What crosses the wire and what it costs: schemas, codecs, frames, states, the ledger."""
