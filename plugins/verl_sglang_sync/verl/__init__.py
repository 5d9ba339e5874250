"""Our classes that verl calls (rollout, replica, checkpoint engine), and the exports of verl."""
