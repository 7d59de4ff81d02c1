"""From tars and folders of images to batches: the index over them, one entry's bytes, its annotation and its pixels, and the loader."""
