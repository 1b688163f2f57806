"""What a machine has and how fast it is; knows no model."""
