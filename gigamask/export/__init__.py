"""Export of models to other projects' formats, verified by reading them back with their
libraries."""
