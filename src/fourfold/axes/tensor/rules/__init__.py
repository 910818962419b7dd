"""Rules of the tensor axis: what is legal, who holds what, and what is sent. No torch."""
