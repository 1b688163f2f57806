"""Text, JSON, files, sizes and formats; knows no model."""
