"""The tensor axis of a step: the model is cut, and what all tensor ranks have is counted once."""
