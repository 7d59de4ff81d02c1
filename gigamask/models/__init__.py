"""The models: SAM and the masked autoencoder its encoder may start from; their sizes, starts and weights."""
