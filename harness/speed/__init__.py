"""What ``job=speed`` measures and reports: forwards, memory bandwidth, decoding beside ``transformers``, memory.

``records`` and ``numbers`` need no torch; ``forwards``, ``bandwidth`` and ``stock`` run models.
"""
