"""Running programs that a model wrote, contained by the kernel. ``sandbox`` sets it up, ``inside`` runs within it."""
