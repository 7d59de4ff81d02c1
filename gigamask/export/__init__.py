"""Export: models in the formats of others, read back with their libraries and compared."""
