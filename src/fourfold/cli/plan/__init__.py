"""The command `fourfold plan`, and `plan=auto` of a training."""
