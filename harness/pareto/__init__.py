"""The search for speed and quality at once: what is searched, how a trial is scored, what is kept of all of them."""
