"""The coordinator's parts: dispatch, responses, membership, aggregation, commands and records."""
