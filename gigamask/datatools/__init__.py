"""What is done with data before training: synthetic scenes are written, an index is described."""
