"""Does the laid-out model compute what the whole one does? First batch, digests, tolerance."""
