"""Quality metrics: hand-computed values, equality with the libraries, and texts that must not break them."""

import itertools
import math
from importlib.metadata import version
from typing import cast

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from harness.scoring import METRICS, final_number, normalize_answer, pass_at_k, sentences, with_companions

BLEU_SWAPPED = 100 * (1 * 1 / 3 * 1 / 4 * 1 / 4) ** 0.25  # no 3-gram, no 4-gram: smoothed to 1/(2*2) and 1/(4*1)

HAND = [
    ("bleu", "the cat sat on it", ["the cat sat on it"], 100),
    ("bleu", "the cat sat", ["the cat sat on"], 100 * math.exp(1 - 4 / 3)),  # every n-gram right, too short
    ("bleu", "a b c d", ["a b d c"], BLEU_SWAPPED),
    ("chrf", "ab", ["ab"], 100),
    ("chrf", "ab", ["ac"], 100 * 5 * 0.25 * 0.25 / (4 * 0.25 + 0.25)),  # 1-grams 1/2, 2-grams 0: both means 1/4
    ("chrf", "abc", ["ab c", "x"], 100),  # spaces count for nothing; the best reference
    ("rouge1", "the cat sat", ["the cat sat down"], 100 * 6 / 7),  # precision 3/3, recall 3/4
    ("rouge1", "a b c d", ["a b x d"], 75),
    ("rouge1", "a b", ["x y", "b z", "c"], 50),  # the best reference
    ("rouge2", "the cat sat", ["the cat sat"], 100),
    ("rouge2", "the cat sat", ["the cat sat down"], 80),  # precision 2/2, recall 2/3
    ("rouge2", "a b c d", ["a b x d c d"], 50),  # precision 2/3, recall 2/5
    ("rouge2", "a b", ["x y", "a b", "a"], 100),  # the best reference
    ("rougeLsum", "the cat sat", ["the cat sat down"], 100 * 6 / 7),  # precision 3/3, recall 3/4
    ("rougeLsum", "Dogs bark. Cats purr.", ["Cats purr .\nDogs bark ."], 100),  # sentences in another order
    ("rougeLsum", "Running dogs bark.", ["Run dog barks."], 100),  # stemmed
    ("exact_match", "The Beatles!", ["the rolling stones", "beatles"], 100),
    ("exact_match", "Paris, France", ["Paris"], 0),
    ("exact_match", " U.S.A. ", ["usa"], 100),
    ("f1", "the big red dog", ["red dog"], 80),  # 2 common, 3 + 2 words
    ("f1", "x y y", ["y y z"], 100 * 4 / 6),  # repeated words count as often as both have them
    ("f1", "cat", ["dog", "cat cat"], 100 * 2 / 3),
    ("f1", "cat", ["dog"], 0),
    ("exact_match", "", [""], 100),  # no answer, and none given
    ("exact_match", "the", [""], 100),  # nothing remains of it
    ("exact_match", "", ["", "cat"], 0),  # an answer there is
    ("f1", "", [""], 100),
    ("f1", "cat", [""], 0),
    ("f1", "", ["...", "the cat"], 0),
    ("accuracy", "5 + 3 = 8\n#### 8", ["8"], 100),
    ("accuracy", "The total is $2,125.00.", ["2,125"], 100),
    ("accuracy", "so 18 - 3 = 15 dollars", ["18"], 0),
    ("unparsed", "eighteen", ["18"], 100),
    ("unparsed", "#### 17", ["18"], 0),  # wrong, but a number
    ("unparsed", "", ["18"], 100),
    ("pass@1", "passed", ["x = 1"], 100),
    ("pass@1", "failed", ["x = 1"], 0),
    ("pass@1", "timeout", ["x = 1"], 0),
    ("timeout", "passed", ["x = 1"], 0),
    ("timeout", "failed", ["x = 1"], 0),
    ("timeout", "timeout", ["x = 1"], 100),
]

QUALITY = [name for name, metric in METRICS.items() if metric.higher_is_better and not metric.executes]
"""Metrics of texts; what only counts misses, or takes an outcome, is left out."""

NUMBERS = [
    ("#### 18", "18"),
    ("####18", "18"),
    ("####\n18", "18"),
    ("7 then #### $1,018.50.", "1018.50"),
    ("#### 5 * 3 = 15\nThere are 3 boxes.", "15"),
    ("#### 18\n\nNext question: 2 + 2\n#### ", "18"),
    ("#### none, but 7 before is gone", "7"),
    ("She has 3, 4 or 12 eggs!", "12"),
    ("it is -5", "-5"),
    ("it is -$5", "-5"),
    ("it is \u22125", "-5"),
    ("20-5", "5"),
    ("(20)-5", "5"),
    ("**42**", "42"),
    ("\\boxed{42}", "42"),
    ("25%", "25"),
    ("about .5", ".5"),
    ("\u00a01,234,567\u00a0", "1234567"),
    ("1,2,3", "3"),
    ("no number", None),
    ("", None),
]


@pytest.mark.parametrize(("name", "prediction", "references", "value"), HAND)
def test_sample_equals_the_value_computed_by_hand(
    name: str, prediction: str, references: list[str], value: float
) -> None:
    assert METRICS[name].sample(prediction, references) == pytest.approx(value)


@pytest.mark.parametrize("name", METRICS)
def test_at_least_three_pairs_by_hand_for_every_metric(name: str) -> None:
    assert sum(row[0] == name for row in HAND) >= 3


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_final_number(text: str, number: str | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("prediction", "reference", "right"),
    [("18.0", "18", 1), ("18.", "18", 1), ("$18", "18", 1), ("1,000", "1000", 1), ("18.01", "18", 0), ("180", "18", 0)],
)
def test_accuracy_compares_numbers_not_texts(prediction: str, reference: str, right: int) -> None:
    assert METRICS["accuracy"].sample(f"#### {prediction}", [reference]) == 100 * right


@pytest.mark.parametrize("name", QUALITY)
def test_identity_is_100_and_registry_names_itself(name: str) -> None:
    texts = ["Dr. Ada Roe, 41, paid $1,250.\nShe left \u201cearly\u201d.", "Four 4 small words here"]
    metric = METRICS[name]
    assert metric.name == name and metric.higher_is_better
    assert [metric.sample(text, ["other", text]) for text in texts] == pytest.approx([100, 100])
    assert metric.corpus(texts, [[text] for text in texts]) == pytest.approx(100)


@pytest.mark.parametrize("name", QUALITY)
@pytest.mark.parametrize("prediction", ["", " \n", "...", "\u00a0", "\U0001f600", "####"])
def test_empty_prediction_scores_0(name: str, prediction: str) -> None:
    assert METRICS[name].sample(prediction, ["The 3 cats sat"]) == 0
    assert METRICS[name].corpus([prediction], [["The 3 cats sat"]]) == 0


@pytest.mark.parametrize("name", [*QUALITY, "unparsed"])
def test_no_value_without_references_or_samples(name: str) -> None:
    assert METRICS[name].sample("a", []) is None
    assert METRICS[name].corpus([], []) is None
    assert METRICS[name].corpus(["a"], [[]]) is None


@pytest.mark.parametrize("name", [*QUALITY, "unparsed"])
def test_a_string_in_place_of_a_list_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="list of texts"):
        METRICS[name].sample("the cat", "the cat")
    with pytest.raises(TypeError, match="list of texts"):
        METRICS[name].corpus("the cat", [["the cat"]])
    with pytest.raises(TypeError, match="list of texts"):
        METRICS[name].corpus(["the cat"], ["the cat"])
    with pytest.raises(ValueError, match="2 predictions"):
        METRICS[name].corpus(["a", "b"], [["a"]])


PREDICTIONS = ["The cat sat on the mat today.", "It rains.", "A much longer sentence about nothing at all."]
REFERENCES = [["The cat sat on a mat."], ["It is raining."], ["A longer sentence about nothing."]]


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_bleu_and_chrf_equal_sacrebleu_and_carry_its_signature(name: str) -> None:
    streams = [[texts[0] for texts in REFERENCES]]
    bleu = name == "bleu"
    corpus = sacrebleu.corpus_bleu(PREDICTIONS, streams) if bleu else sacrebleu.corpus_chrf(PREDICTIONS, streams)
    assert METRICS[name].corpus(PREDICTIONS, REFERENCES) == corpus.score
    for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True):
        sentence = sacrebleu.sentence_bleu(prediction, texts) if bleu else sacrebleu.sentence_chrf(prediction, texts)
        assert METRICS[name].sample(prediction, texts) == sentence.score
    scorer = sacrebleu.BLEU() if bleu else sacrebleu.CHRF()
    scorer.corpus_score(PREDICTIONS, streams)
    assert METRICS[name].scorer(REFERENCES).partition("|")[2] == str(scorer.get_signature())
    assert "nrefs:var" in METRICS[name].scorer([["a"], ["a", "b"]])


@pytest.mark.parametrize("name", ["bleu", "chrf"])
def test_several_references_equal_sacrebleu_too(name: str) -> None:
    references = [["The cat sat on a mat.", "A cat sat."], ["It is raining."], ["A longer sentence.", "It", "About"]]
    streams = [[texts[i] if i < len(texts) else None for texts in references] for i in range(3)]
    scorer = sacrebleu.BLEU() if name == "bleu" else sacrebleu.CHRF()
    direct = scorer.corpus_score(PREDICTIONS, cast("list[list[str]]", streams))
    assert METRICS[name].corpus(PREDICTIONS, references) == direct.score


def test_every_metric_says_who_computed_it() -> None:
    for name, metric in METRICS.items():
        assert metric.scorer([["a text"]]), name
    assert METRICS["rougeLsum"].scorer([]).startswith(f"rouge-score {version('rouge-score')} rougeLsum, F-measure")


def test_companions_stand_beside_and_once() -> None:
    assert with_companions(("accuracy",)) == ("accuracy", "unparsed")
    assert with_companions(("unparsed", "accuracy", "f1")) == ("unparsed", "accuracy", "f1")
    assert with_companions(["pass@1"]) == ("pass@1", "timeout") and with_companions(()) == ()


@pytest.mark.parametrize(("programs", "passed"), [(1, 0), (1, 1), (4, 1), (6, 2), (7, 7), (7, 0)])
def test_pass_at_k_is_the_share_of_draws_with_a_program_that_passes(programs: int, passed: int) -> None:
    results = [True] * passed + [False] * (programs - passed)
    for k in range(1, programs + 1):
        draws = list(itertools.combinations(results, k))
        assert pass_at_k(programs, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    assert pass_at_k(programs, passed, programs + 1) is None


def test_pass_at_k_is_unbiased_where_the_plain_estimate_is_not() -> None:
    """Over all outcomes of 5 programs, each passing with chance 0.3, its mean is P(one of 2 passes) = 1 - 0.7 ** 2."""
    law = [math.comb(5, c) * 0.3**c * 0.7 ** (5 - c) for c in range(6)]
    ours = sum(chance * (pass_at_k(5, c, 2) or 0.0) for c, chance in enumerate(law))
    plain = sum(chance * (1 - (1 - c / 5) ** 2) for c, chance in enumerate(law))
    assert ours == pytest.approx(1 - 0.7**2) and plain != pytest.approx(1 - 0.7**2, abs=0.01)


def test_pass_at_k_refuses_impossible_counts() -> None:
    for programs, passed, k in ((3, 4, 1), (3, -1, 1), (3, 1, 0)):
        with pytest.raises(ValueError, match="0 <= passed <= programs"):
            pass_at_k(programs, passed, k)


def test_corpus_bleu_pools_counts_and_takes_several_references() -> None:
    predictions = ["a b c d", "a b c d"]
    assert METRICS["bleu"].corpus(predictions, [["a b c d"], ["e f g h"]]) == pytest.approx(50)  # 4/8, 3/6, 2/4, 1/2
    assert METRICS["bleu"].corpus(predictions, [["a b c d"], ["e f g h", "a b c d"]]) == pytest.approx(100)


@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeLsum"])
def test_rouge_equals_rouge_score(name: str) -> None:
    scorer = RougeScorer([name], use_stemmer=True)  # every text here is one sentence: nothing to split
    direct = [
        100 * scorer.score(texts[0], prediction)[name].fmeasure
        for prediction, texts in zip(PREDICTIONS, REFERENCES, strict=True)
    ]
    metric = METRICS[name]
    assert [metric.sample(*pair) for pair in zip(PREDICTIONS, REFERENCES, strict=True)] == direct
    assert metric.corpus(PREDICTIONS, REFERENCES) == pytest.approx(sum(direct) / 3)


def test_sentences_end_at_marks_and_lines_but_not_after_titles() -> None:
    text = 'Mr. J. Smith met Dr. Wu in the U.S. Senate. "Why?" he said. It cost 3.5 million! Then (we saw\nthe end .'
    assert sentences(text) == [
        "Mr. J. Smith met Dr. Wu in the U.S. Senate.",
        '"Why?" he said.',
        "It cost 3.5 million!",
        "Then (we saw",
        "the end .",
    ]
    assert sentences("\n\n") == []


def test_normalize_answer_is_the_one_of_squad() -> None:
    assert normalize_answer("  The\u00a0Quick, an 'A-Team'  ") == "quick ateam"
    assert normalize_answer("Padm\u00e9 Amidala") == "padm\u00e9 amidala"
