"""Routes by which bytes reach the engine: pull, exchange, send, or export (mapped or broadcast)."""
