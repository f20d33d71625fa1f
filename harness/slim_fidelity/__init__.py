"""What ``job=fidelity`` measures and reports: how close slim verifiers come to the full one, and the paper's theory.

``records``, ``numbers``, ``tables`` and ``figure`` need no torch; ``measure`` runs models.
"""
