"""Fleettune's core: one command to fine-tune language models on any layout.

Importing this package is cheap and needs no torch; the training half lives behind the extra `[train]`.
"""

__version__ = "0.1.0"
