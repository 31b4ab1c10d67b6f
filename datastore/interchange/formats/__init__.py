"""Foreign log formats, one file each, read into episodes and written from them."""
