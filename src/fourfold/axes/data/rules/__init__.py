"""Rules of the data axis: what is legal, who holds what, and what is sent. No torch."""
