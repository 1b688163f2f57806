"""What must not change while code moves: plans, programs, and the bits of logits."""
