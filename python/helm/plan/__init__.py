"""The plan as records and as JSON; makes none."""
