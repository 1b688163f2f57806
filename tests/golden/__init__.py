"""What must not change while code moves: plans, and the bits of logits."""
