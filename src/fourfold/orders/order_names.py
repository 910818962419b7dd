"""Order names: the orders of samples that a user may choose. Apart from the orders, which need NumPy."""

ORDERS = ("global", "windowed")
