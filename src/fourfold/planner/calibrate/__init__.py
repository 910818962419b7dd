"""Calibration of this machine: what all ranks of a host measure at once, for the prices of plans."""
