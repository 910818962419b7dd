"""The planner: facts, prices, prediction, search and calibration. Nothing that trains imports it."""
