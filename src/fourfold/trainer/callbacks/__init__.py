"""Callbacks that are shipped: loggers, a CSV writer, early stopping. A library is imported when its run begins.

Law: a constructor checks its arguments and that its library is installed; it opens nothing.
"""
