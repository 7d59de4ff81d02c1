"""The models: SAM, the masked autoencoder its encoder may start from, and the relevance network; their sizes, starts and weights."""
