"""The trainer's side of its communication with engines: HTTP, sessions, update groups."""
