"""Tensor shapes are checked while tests run: a wrong one is refused, in the first calls of a test."""

import pytest
import torch
from jaxtyping import TypeCheckError

from harness.decode.accept import first_stop
from tests import shapes
from tests.toys import shapes_unchecked

KEPT = torch.tensor([True, False])


def test_a_wrong_shape_is_refused_in_the_first_calls_of_a_test_and_again_in_the_next() -> None:
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="first_stop"):
            first_stop(KEPT[None])
        for _ in range(shapes.CALLS - 1):
            assert int(first_stop(KEPT)) == 1
        first_stop(KEPT[None])
        shapes.begin()


def test_nothing_is_checked_where_that_is_not_wanted() -> None:
    with shapes_unchecked():
        first_stop(KEPT[None])
    with pytest.raises(TypeCheckError):
        first_stop(KEPT[None])
