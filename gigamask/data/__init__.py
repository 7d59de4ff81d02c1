"""From SA-1B's tars to batches: tar headers, the index over them, one entry's bytes, its annotation and its pixels, and the loader."""
