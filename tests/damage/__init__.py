"""Random damage of every kind to a store: all of it found, located to its rows, and nothing else called damaged."""
