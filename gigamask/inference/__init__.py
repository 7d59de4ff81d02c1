"""A trained model put to use: an image is embedded once and prompted as often as one likes, or everything in it is segmented."""
