"""Calls of tools in an answer's text: found, streamed as OpenAI's deltas, and forced by a schema."""
