"""Reports of runs and evaluations as single HTML files."""
