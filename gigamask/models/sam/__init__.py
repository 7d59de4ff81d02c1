"""Segment Anything's image encoder, prompt encoder and mask decoder."""
