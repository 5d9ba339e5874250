"""Route "pull": engines read the trainer ranks' parameters in place."""
