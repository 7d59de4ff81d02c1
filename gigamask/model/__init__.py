"""The model: image encoder, prompt encoder, mask decoder, their sizes and their weights. Floor 2."""
