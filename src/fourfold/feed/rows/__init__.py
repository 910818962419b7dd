"""Rows of a database as samples."""
