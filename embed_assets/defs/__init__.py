"""What Dagster sees: assets, jobs, sensors, schedules. Thin: what they do stands in `resources` and `pipeline`."""
