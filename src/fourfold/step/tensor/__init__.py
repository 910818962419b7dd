"""The tensor axis of a step: the model is cut by its rules, and what all tensor ranks have is counted once."""
