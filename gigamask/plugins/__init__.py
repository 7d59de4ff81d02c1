"""Capabilities beside the core, one folder each; none imports another, the core imports none."""
