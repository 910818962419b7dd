"""The four axes of a mesh, a folder each. They never import each other."""
