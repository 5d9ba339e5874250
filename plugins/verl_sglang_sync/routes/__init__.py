"""How bytes reach the engine: pulled, exchanged, sent, or exported (then mapped, or broadcast)."""
