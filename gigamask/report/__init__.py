"""Reports: what runs and scores were, on one HTML page."""
