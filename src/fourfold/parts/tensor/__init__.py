"""The tensor axis: layers that compute with a part of their weights, and the collectives between them."""
