"""Measures this machine, and a loaded model on it."""
