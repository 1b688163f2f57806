"""Tool calls in an answer: found in its text, streamed as deltas, forced by a schema."""
