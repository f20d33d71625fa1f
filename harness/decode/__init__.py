"""Decoding methods, their gates and their acceptance rules. Axis letters as in ``harness.model``.

Words: the drafter proposes a *block* of tokens; a *verifier* scores it in one forward; a *gate* gives each drafted
token a *route*; a draft that is not kept is replaced by a *correction*; a *bonus* is the extra token after a fully kept
block. In the paper's symbols p is the drafter, q' the slim verifier and q the full verifier.
"""
