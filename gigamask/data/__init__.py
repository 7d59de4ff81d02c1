"""From tars and image folders to batches: index, storage, annotations, images and loader."""
