"""The compiled kernels on a CUDA device: against the references, without host synchronisation, inside CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from harness.kernels.gate import ACCEPT, ESCALATE, REGENERATE, Routed, route_block, route_block_reference
from harness.kernels.residual import sample_residual, sample_residual_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

# (tokens of the block, vocabulary, dtype of the scores): Llama 3, Gemma, SmolLM2, and one that no block size divides
SHAPES = [
    (5, 128256, torch.bfloat16),
    (1, 128256, torch.bfloat16),
    (8, 256000, torch.bfloat16),
    (8, 49152, torch.float16),
    (3, 4099, torch.float32),
]
ACCEPT_AT, KEEP_AT = 0.5, 0.2


@pytest.fixture(autouse=True)
def compiled() -> None:
    pytest.importorskip("triton", reason="needs triton")


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever would wait for the device raises inside."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Inputs:
    """What a block with refusals feeds to both kernels; ``fill`` puts another block into the same memory."""

    def __init__(self, gamma: int, vocabulary: int, dtype: torch.dtype) -> None:
        self.scores = torch.empty(gamma, vocabulary, dtype=dtype, device="cuda")
        self.tokens = torch.empty(gamma, dtype=torch.int64, device="cuda")
        self.verifier = torch.empty(gamma + 1, vocabulary, device="cuda")
        self.draft = torch.empty(gamma, vocabulary, device="cuda")
        self.noise = torch.empty(vocabulary, device="cuda")

    def fill(self, seed: int) -> "Inputs":
        """Drafts that the slim verifier finds likely; a third of the scores masked; largest scores that tie."""
        generator = torch.Generator().manual_seed(seed)
        gamma, vocabulary = self.scores.shape
        scores = torch.randn(gamma, vocabulary, generator=generator)
        tokens = torch.randint(vocabulary, (gamma,), generator=generator)
        scores = scores.masked_fill(torch.rand(gamma, vocabulary, generator=generator) < 1 / 3, -torch.inf)
        largest = scores.amax(-1, keepdim=True)
        scores.scatter_(-1, torch.randint(vocabulary, (gamma, 2), generator=generator), largest.expand(-1, 2))
        scores.scatter_(-1, tokens[:, None], largest - 2.5 * torch.rand(gamma, 1, generator=generator))
        self.scores.copy_(scores)
        self.tokens.copy_(tokens)
        self.verifier.copy_(torch.randn(self.verifier.shape, generator=generator).softmax(-1))
        self.draft.copy_(torch.randn(self.draft.shape, generator=generator).softmax(-1))
        self.noise.copy_(torch.empty(vocabulary).exponential_(generator=generator))
        return self


def check_routes(got: Routed, inputs: Inputs) -> None:
    """Against the reference on the CPU. Exponentials differ in their last bits, so no ratio may lie on a threshold."""
    want = route_block_reference(inputs.scores.cpu(), inputs.tokens.cpu(), ACCEPT_AT, KEEP_AT)
    torch.testing.assert_close(got.ratio.cpu(), want.ratio, rtol=2e-5, atol=0.0)
    for threshold in (ACCEPT_AT, KEEP_AT):
        assert (want.ratio - threshold).abs().min() > 1e-5, "choose another seed"
    assert torch.equal(got.top.cpu(), want.top)
    assert torch.equal(got.codes.cpu(), want.codes)
    assert torch.equal(got.stop.cpu(), want.stop)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_routes_are_the_references(shape: tuple[int, int, torch.dtype]) -> None:
    inputs = Inputs(*shape)
    codes: set[int] = set()
    for seed in range(8):
        inputs.fill(seed)
        routed = route_block(inputs.scores, inputs.tokens, ACCEPT_AT, KEEP_AT)
        assert routed.ratio.device == inputs.scores.device
        check_routes(routed, inputs)
        codes |= set(routed.codes.tolist())
    assert codes == {ACCEPT, REGENERATE, ESCALATE}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_drawn_token_is_the_references(shape: tuple[int, int, torch.dtype], dtype: torch.dtype) -> None:
    """To the last bit, so on the CPU and on the device alike, with nothing left to chance in the comparison."""
    inputs = Inputs(*shape).fill(0)
    verifier, draft, noise = (tensor.to(dtype) for tensor in (inputs.verifier, inputs.draft, inputs.noise))
    for stop in range(shape[0] + 1):
        for drafted_from in (draft, None):
            arguments = (verifier, drafted_from, inputs.tokens, torch.tensor(stop, device="cuda"), noise)
            got = int(sample_residual(*arguments))
            assert got == int(sample_residual_reference(*arguments))
            on_cpu = drafted_from.cpu() if drafted_from is not None else None
            rest = (inputs.tokens.cpu(), torch.tensor(stop), noise.cpu())
            assert got == int(sample_residual_reference(verifier.cpu(), on_cpu, *rest))


def test_a_residual_without_mass_is_replaced_by_the_verifier() -> None:
    inputs = Inputs(4, 128256, torch.bfloat16).fill(1)
    inputs.draft.copy_(inputs.verifier[:4])
    for stop in range(4):
        place = torch.tensor(stop, device="cuda")
        got = sample_residual(inputs.verifier, inputs.draft, inputs.tokens, place, inputs.noise)
        assert int(got) == int((inputs.verifier[stop] / inputs.noise).argmax())


@pytest.mark.parametrize("given", [True, False], ids=["sampled drafts", "certain drafts"])
def test_one_pass_waits_for_nothing(given: bool) -> None:
    inputs = Inputs(5, 128256, torch.bfloat16).fill(2)
    draft = inputs.draft if given else None
    for _ in range(2):  # the first compiles
        with nothing_waits():
            routed = route_block(inputs.scores, inputs.tokens, ACCEPT_AT, KEEP_AT)
            sample_residual(inputs.verifier, draft, inputs.tokens, routed.stop, inputs.noise)


@pytest.mark.parametrize(
    ("route", "sample"),
    [(route_block, sample_residual), (route_block_reference, sample_residual_reference)],
    ids=["triton", "reference"],
)
@pytest.mark.parametrize("given", [True, False], ids=["sampled drafts", "certain drafts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_captured_graph_follows_its_inputs(
    shape: tuple[int, int, torch.dtype],
    given: bool,
    route: Callable[..., Routed],
    sample: Callable[..., Tensor],
) -> None:
    """One capture, replayed over other blocks with other stops; the stop goes from one kernel to the other unread."""
    inputs = Inputs(*shape).fill(0)

    def run() -> tuple[Routed, Tensor]:
        routed = route(inputs.scores, inputs.tokens, ACCEPT_AT, KEEP_AT)
        draft = inputs.draft if given else None
        return routed, sample(inputs.verifier, draft, inputs.tokens, routed.stop, inputs.noise)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles, which a capture could not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed, token = run()
    stops: set[int] = set()
    for seed in range(12):
        inputs.fill(seed)
        with nothing_waits():
            graph.replay()
        check_routes(routed, inputs)
        draft = inputs.draft.cpu() if given else None
        rest = (inputs.tokens.cpu(), routed.stop.cpu(), inputs.noise.cpu())
        assert int(token) == int(sample_residual_reference(inputs.verifier.cpu(), draft, *rest))
        stops.add(int(routed.stop))
    assert len(stops) > 1


def test_kernels_run_where_their_tensors_are() -> None:
    """A model over several GPUs leaves its logits on the last one, which is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    scores, tokens = torch.randn(4, 4099, device="cuda:1"), torch.arange(4, device="cuda:1")
    routed = route_block(scores, tokens, ACCEPT_AT, KEEP_AT)
    want = route_block_reference(scores, tokens, ACCEPT_AT, KEEP_AT)
    assert torch.equal(routed.codes, want.codes)
    assert torch.cuda.current_device() == 0
