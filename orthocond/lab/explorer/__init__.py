"""A page in which generators run: one HTML file, no server."""
