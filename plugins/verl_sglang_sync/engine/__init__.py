"""The trainer's end of what it says to engines: HTTP, sessions, update groups."""
