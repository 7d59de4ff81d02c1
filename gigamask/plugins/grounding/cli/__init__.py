"""Commands of grounding."""
