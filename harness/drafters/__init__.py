"""Drafter families, one file each: something that proposes the next few tokens."""
