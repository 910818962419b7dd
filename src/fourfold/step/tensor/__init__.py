"""The tensor axis of a step: what its rules say of a model's layers."""
