"""Files as sources: their records are read where they are, without packing."""
