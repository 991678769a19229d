"""Guessing tokens ahead, and verifying the guesses with the model, several in one step (docs/speculative.md)."""
