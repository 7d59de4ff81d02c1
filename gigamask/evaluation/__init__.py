"""Measures: how good a model's masks are."""
