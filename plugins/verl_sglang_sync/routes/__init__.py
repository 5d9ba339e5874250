"""How bytes reach the engine: pulled, exchanged, exported into staging, or broadcast."""
