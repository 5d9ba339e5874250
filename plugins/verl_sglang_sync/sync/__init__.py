"""One sync from start to end, and the stages around it."""
