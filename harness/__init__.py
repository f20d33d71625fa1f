"""Reference harness for multi-tier speculative decoding (VIA-SD, arXiv 2606.12243)."""

__version__ = "0.1.0"
