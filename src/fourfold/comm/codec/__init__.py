"""Codecs: gradient compression with error feedback."""
