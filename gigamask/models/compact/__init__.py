"""The parts of the model `compact`: a convolutional encoder, and a decoder in windows."""
