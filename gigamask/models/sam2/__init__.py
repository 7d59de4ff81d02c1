"""The image part of SAM 2.1: Hiera with a feature pyramid, and its mask decoder."""
