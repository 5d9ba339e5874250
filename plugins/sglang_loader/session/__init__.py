"""One sync on one engine rank: receive, load (eagerly or by load plan), check, publish."""
