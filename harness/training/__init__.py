"""Training drafters on what the full verifier writes: data, students, objectives, the loop. The job puts it together.

Letters of shapes: B sequences side by side, S positions, R rows (positions of all sequences, flattened), E width,
V vocabulary, N rows of the reduced head, G drafted tokens.
"""
