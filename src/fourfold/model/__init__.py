"""The user's model, batch and loss, as a step calls and reads them."""
