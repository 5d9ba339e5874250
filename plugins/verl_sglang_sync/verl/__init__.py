"""What verl calls: a rollout, a replica and a checkpoint engine of ours; and verl's exports."""
