"""The worst case of a run: which tokens its slim verifier let through that the full one would not have written.

``judge`` alone needs torch; ``page``, ``tables`` and ``figure`` read what it found.
"""
