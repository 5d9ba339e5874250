"""One sync on one engine rank: receive, load (eagerly or by plan), check, publish."""
