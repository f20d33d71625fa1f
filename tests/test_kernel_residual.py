"""The race for a replaced draft: reference and kernel against plain Python in float64, and its law."""

from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from harness.kernels.residual import sample_residual_reference, sample_residual_triton
from tests.kernels import DEVICE, RACES, SIZES, at, implementations, needs_triton, race_of, seeded
from tests.toys import shapes_unchecked


def raced_by_hand(verifier: Tensor, draft: Tensor | None, tokens: Tensor, stop: int, noise: Tensor) -> int:
    verified = verifier[stop].double().tolist()
    weights = verified
    if stop < len(tokens):
        certain = [float(place == int(tokens[stop])) for place in range(len(verified))]
        drafted = draft[stop].double().tolist() if draft is not None else certain
        weights = [max(0.0, q - p) for q, p in zip(verified, drafted, strict=True)]
    if not any(weight > 0 for weight in weights):
        weights = verified
    keys = [weight / time for weight, time in zip(weights, noise.double().tolist(), strict=True)]
    return keys.index(max(keys))


@implementations(RACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocabulary", SIZES)
def test_the_winner_is_that_of_plain_python(run: Callable[..., Tensor], vocabulary: int, dtype: torch.dtype) -> None:
    gamma = 1 + vocabulary % 4
    verifier, draft, tokens, noise = race_of(vocabulary, gamma, vocabulary, dtype)
    for stop in range(gamma + 1):
        for drafted_from in (draft, None):
            token = run(verifier, drafted_from, tokens, at(stop), noise)
            assert (token.shape, token.dtype) == ((), torch.int64)
            assert int(token) == raced_by_hand(verifier, drafted_from, tokens, stop, noise)


@needs_triton
def test_kernel_and_reference_agree_to_the_last_bit() -> None:
    """Noise that makes many keys equal but for their rounding: any other division or sum would find another winner."""
    generator = seeded(5)
    for _ in range(40):
        verifier = torch.rand(2, 500, generator=generator).to(DEVICE)
        draft = torch.rand(1, 500, generator=generator).to(DEVICE)
        noise = (verifier[0] - draft[0]).clamp(min=1e-3) / 3
        arguments = (verifier, draft, torch.zeros(1, dtype=torch.int64, device=DEVICE), at(0), noise)
        assert int(sample_residual_triton(*arguments)) == int(sample_residual_reference(*arguments))


@implementations(RACES)
def test_rows_may_be_any_view(run: Callable[..., Tensor]) -> None:
    probs = torch.rand(9, 411, generator=seeded(2)).to(DEVICE)
    tokens = torch.arange(8, device=DEVICE)[::2]
    noise = torch.empty(822).exponential_(generator=seeded(3)).to(DEVICE)[::2]
    for verifier, draft in ((probs[:5], probs[5:]), (probs[::2], probs[1::2]), (probs[4:], probs[:1].expand(4, -1))):
        for stop in range(5):
            want = raced_by_hand(verifier, draft, tokens, stop, noise)
            assert int(run(verifier, draft, tokens, at(stop), noise)) == want
    columns = probs[:5, ::2]
    assert int(run(columns, None, tokens, at(2), noise[:206])) == raced_by_hand(columns, None, tokens, 2, noise[:206])


@implementations(RACES)
def test_the_first_of_equal_keys_wins(run: Callable[..., Tensor]) -> None:
    verifier = torch.zeros(3, 200, device=DEVICE)
    verifier[:, [150, 70, 71, 199]] = 0.25
    draft = torch.zeros(2, 200, device=DEVICE)
    draft[:, 70] = 1.0
    arguments = (torch.tensor([70, 3], device=DEVICE), at(0), torch.ones(200, device=DEVICE))
    assert int(run(verifier, draft, *arguments)) == 71
    assert int(run(verifier, None, *arguments)) == 71
    assert int(run(verifier, None, arguments[0], at(1), arguments[2])) == 70
    assert int(run(verifier, None, arguments[0], at(2), arguments[2])) == 70


@implementations(RACES)
def test_a_residual_without_mass_is_replaced_by_the_verifier(run: Callable[..., Tensor]) -> None:
    verifier, _, tokens, noise = race_of(4, 3, 97, torch.float32)
    for stop in range(3):
        same = verifier[:3].clone()
        assert int(run(verifier, same, tokens, at(stop), noise)) == int((verifier[stop] / noise).argmax())
    certain = torch.zeros(4, 97, device=DEVICE)
    certain[:, 96] = 1.0
    assert int(run(certain, None, torch.full((3,), 96, device=DEVICE), at(1), noise)) == 96


@implementations(RACES)
def test_a_weight_of_0_never_wins(run: Callable[..., Tensor]) -> None:
    """However early its time and however late and unlikely the others."""
    verifier = torch.zeros(2, 200, device=DEVICE)
    verifier[:, 10], verifier[:, 120] = 1 - 1e-30, 1e-30
    draft = torch.zeros(1, 200, device=DEVICE)
    draft[0, 10] = 1.0
    noise = torch.full((200,), 1e-37, device=DEVICE)
    noise[120] = 80.0
    tokens = torch.tensor([10], device=DEVICE)
    for drafted_from in (draft, None):
        assert int(run(verifier, drafted_from, tokens, at(0), noise)) == 120


QS = (0.05, 0.30, 0.15, 0.02, 0.20, 0.08, 0.08, 0.12)
PS = (0.15, 0.10, 0.05, 0.22, 0.02, 0.18, 0.08, 0.20)


def drawn(run: Callable[..., Tensor], draws: int, draft: Tensor | None, stop: int) -> Tensor:
    """How often each token wins seeded races."""
    verifier = torch.tensor([QS, QS], dtype=torch.float64, device=DEVICE)
    tokens = torch.tensor([1], device=DEVICE)
    noise = torch.empty(draws, len(QS), dtype=torch.float64).exponential_(generator=seeded(11)).to(DEVICE)
    with shapes_unchecked():
        winners = torch.stack([run(verifier, draft, tokens, at(stop), row) for row in noise])
    return winners.cpu().bincount(minlength=len(QS)).double()


def p_value(counts: Tensor, weights: Sequence[float]) -> float:
    """Chi-square test of counts against the normalised weights; 0 if a token of weight 0 was drawn."""
    law = torch.tensor(weights, dtype=torch.float64)
    possible = law > 0
    if counts[~possible].any():
        return 0.0
    expected = counts.sum() * law[possible] / law.sum()
    assert expected.min() > 5  # what the chi-square approximation asks for
    return float(chi2.sf(float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1))


LEFT = [max(0.0, q - p) for q, p in zip(QS, PS, strict=True)]
WITHOUT_DRAFT = [0.0 if token == 1 else q for token, q in enumerate(QS)]
LAWS: dict[str, tuple[Sequence[float], bool, int]] = {
    "residual": (LEFT, True, 0),
    "residual of a certain draft": (WITHOUT_DRAFT, False, 0),
    "bonus": (QS, True, 1),
    "bonus after a certain draft": (QS, False, 1),
}
DRAWS = pytest.mark.parametrize(
    ("run", "draws"),
    [
        pytest.param(sample_residual_reference, 20_000, id="reference"),
        pytest.param(sample_residual_triton, 300, id="triton", marks=needs_triton),
    ],
)


@pytest.mark.parametrize("law", LAWS)
@DRAWS
def test_the_race_has_its_stated_law(run: Callable[..., Tensor], draws: int, law: str) -> None:
    weights, given, stop = LAWS[law]
    draft = torch.tensor([PS], dtype=torch.float64, device=DEVICE) if given else None
    assert p_value(drawn(run, draws, draft, stop), weights) > 1e-3


@DRAWS
def test_drawing_from_the_verifier_itself_fails_the_same_test(run: Callable[..., Tensor], draws: int) -> None:
    no_residual = drawn(run, draws, torch.zeros(1, len(QS), dtype=torch.float64, device=DEVICE), stop=0)
    assert p_value(no_residual, LEFT) < 1e-12
    assert p_value(no_residual, WITHOUT_DRAFT) < 1e-12
    assert p_value(no_residual, QS) > 1e-3, "it is a draw, only from another law"
