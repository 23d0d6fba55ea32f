"""Groups of ranks, collectives on them, and what must agree between ranks."""
