"""The embedded model through our loop: the tokens that transformers generates, and all routes of the gate."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.decode.autoregressive import Autoregressive
from harness.decode.base import Decoder, StopRule
from harness.decode.gate import Strictness
from harness.decode.speculative import Speculative
from harness.decode.via_sd import ViaSD
from harness.drafters.prompt_lookup import PromptLookup
from harness.drafters.self_skip import SelfSkip
from harness.model.embedded import embedded_folder
from harness.model.load import Model, load_model
from harness.records import Route
from harness.sampling import RandomChooser, Sampling
from tests.toys import CPU, tiers_of

MASK = "results/masks/embedded_skip30.json"
QUESTIONS = (
    "Repeat this sentence twice: The mill by the river grinds oats and barley for four villages.",
    "Write a short story about a mill and its miller.",
)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(slim_mask=MASK, dtype="float32", device="cpu")


def generate(model: Model, method, prompt: list[int], new_tokens: int = 32):
    decoder = Decoder(method)
    decoder.prefill(prompt)
    return decoder.decode(StopRule(new_tokens, model.tokenizer.eos_ids), RandomChooser(0, CPU))


def test_greedy_tokens_are_those_of_transformers(model: Model) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=torch.float32).eval()
    for question in QUESTIONS:
        prompt = model.tokenizer.chat(question)
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 32, "do_sample": False}
        want = theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
        got = generate(model, Autoregressive(tiers_of(model), Sampling()), prompt)
        assert list(got.token_ids) == want


def test_lossless_methods_give_the_baselines_tokens(model: Model) -> None:
    for question in QUESTIONS:
        prompt = model.tokenizer.chat(question)
        want = generate(model, Autoregressive(tiers_of(model), Sampling()), prompt).token_ids
        for drafter in (PromptLookup, SelfSkip):
            method = Speculative(tiers_of(model), Sampling(), model, 5, drafter)
            assert generate(model, method, prompt).token_ids == want


def test_all_routes_occur_at_temperature_zero_and_alpha1_moves_them(model: Model) -> None:
    taken: dict[float, list[Route]] = {}
    for alpha1 in (0.5, 0.8):
        taken[alpha1] = []
        for question in QUESTIONS:
            method = ViaSD(tiers_of(model), Sampling(), model, 5, PromptLookup, Strictness(alpha1, 0.3))
            blocks = generate(model, method, model.tokenizer.chat(question)).blocks
            taken[alpha1] += [route for block in blocks for route in block.routes]
        assert set(taken[alpha1]) == set(Route)
    assert taken[0.5] != taken[0.8]


def test_the_shipped_mask_skips_nine_layers_and_agrees_with_the_full_verifier(model: Model) -> None:
    assert model.slim_mask is not None
    assert len(model.slim_mask.layers) == 21 and model.slim_mask.skip_ratio == pytest.approx(0.3)
