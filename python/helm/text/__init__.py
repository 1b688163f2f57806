"""Tokens and text, and how the next token is chosen; knows no engine."""
