"""Generator of the bundled model's training text: short stories and talks about them."""
