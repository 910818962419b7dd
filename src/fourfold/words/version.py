"""Version: the version of this package. pyproject.toml and `fourfold.__version__` read it here."""

VERSION = "0.1.0"
