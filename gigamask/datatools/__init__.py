"""Tools that prepare data: download, conversion, verification, repacking and statistics."""
