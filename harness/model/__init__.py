"""The transformer, its caches and its tiers.

Axis letters, here and in ``harness.decode``: ``S`` positions of one forward, ``T`` positions in a cache, ``G`` gamma,
``V`` vocabulary, ``E`` hidden size, ``H`` query heads, ``K`` key-value heads, ``D`` head size, ``L`` layers.
Batch is always 1 and has no axis.
"""
