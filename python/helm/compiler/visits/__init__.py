"""Steps in which weights visit the accelerator piece by piece, and the published policies that are
made of such steps."""
