"""Our classes that verl calls (rollout, replica, checkpoint engine), and verl's exports."""
