"""Plain files as sources: images, arrays, text, JSON lines, CSV."""
