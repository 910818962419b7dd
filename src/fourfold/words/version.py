"""The version of this package, written once: pyproject.toml and `fourfold.__version__` read it here."""

VERSION = "0.1.0"
