"""The version of the package, in one place that any layer can import."""

__version__ = "0.1.0"
