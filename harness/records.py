"""The types that flow from a task through the decoder to a table. Imports no torch.

Only counts and seconds are stored; every rate is derived on reading, in ``metrics.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

SCHEMA = 1
"""Version of the files in a run folder; a reader refuses a newer one."""


class Route(StrEnum):
    """What a gate decides for one drafted token."""

    ACCEPT = "accept"
    REGENERATE = "regenerate"
    ESCALATE = "escalate"


class StopReason(StrEnum):
    """Why a generation ended."""

    LENGTH = "length"
    EOS = "eos"
    STOP_STRING = "stop_string"


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a task, before tokenisation.

    ``input`` replaces ``{input}`` in the task's template; it alone is cut when a prompt is too long.
    ``references`` are all equally right; none where the row asks for something that nobody can be right or wrong on.
    ``meta`` of coding tasks: ``tests``, ``entry_point``, ``setup``; ``after`` is the id of the example whose answer a
    further turn of a conversation goes on from.
    """

    id: str
    input: str
    references: tuple[str, ...]
    meta: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Shot:
    """A worked example that a prompt shows before its own input."""

    input: str
    answer: str


@dataclass(frozen=True, slots=True)
class DataSource:
    """Where a task's rows really came from.

    ``kind`` is ``local``, ``hub`` or ``builtin``; ``location`` a path or a dataset id with its configuration;
    ``revision`` what was asked for and ``commit`` what was read (None when nobody told us: never made up);
    ``sha256`` the digest of the rows used, as canonical JSON. ``shots`` where the worked examples of the prompts came
    from, None where prompts have none.
    """

    kind: str
    location: str
    split: str
    revision: str | None
    commit: str | None
    sha256: str
    rows: int
    shots: "DataSource | None" = None


@dataclass(frozen=True, slots=True)
class BlockTrace:
    """One block of decoding: what was drafted, how each examined draft was routed, what was emitted.

    ``start``  output tokens before the block.
    ``asked``  tokens asked of the drafter (gamma, fewer near the length limit; 0 where a method has no drafter).
    ``drafted``  tokens it proposed; 0 is an autoregressive step of the full verifier.
    ``routes``  of the drafts that were examined and not cut off by the stop rule, in order. Two-tier methods route
    every draft to the full verifier.
    ``kept``  examined drafts that were emitted.
    ``emitted``  output tokens of this block, after the stop rule: kept drafts, then at most one correction or bonus.
    ``bonus``  1 when the last one is the extra token after a fully kept block.
    ``looked_up``  drafted tokens, the last ones, that a drafter with a model took from a table instead.
    ``deciders``  of each route the slim verifier that gave it, from 0, the last one where none did; empty with fewer
    than two.
    """

    start: int
    asked: int
    drafted: int
    routes: tuple[Route, ...]
    kept: int
    emitted: int
    bonus: int
    draft_forwards: int
    slim_forwards: int
    full_forwards: int
    looked_up: int = 0
    deciders: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.looked_up <= self.drafted or len(self.deciders) not in (0, len(self.routes)):
            raise ValueError(f"want 0 <= looked up <= drafted and a decider for each route or for none, got {self}")
        if not 0 <= self.kept <= len(self.routes) <= self.drafted <= self.asked:
            raise ValueError(f"want 0 <= kept <= examined <= drafted <= asked, got {self}")
        if not max(1, self.kept) <= self.emitted <= self.kept + 1:
            raise ValueError(f"want 1 <= emitted and kept <= emitted <= kept + 1, got {self}")
        if self.bonus and not (self.bonus == 1 and self.drafted == self.kept == self.emitted - 1):
            raise ValueError(f"a bonus token follows a fully kept block, got {self}")


@dataclass(frozen=True, slots=True)
class Generation:
    """Output of one prompt. ``token_ids`` excludes the prompt and includes the EOS token when that ended it.

    ``tier_s``  seconds within the forwards of the draft, slim and full tier while decoding; None on devices that run
    ahead of the clock, where reading it would mean waiting.
    """

    token_ids: tuple[int, ...]
    blocks: tuple[BlockTrace, ...]
    stop_reason: StopReason
    tier_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        emitted = sum(block.emitted for block in self.blocks)
        if emitted != len(self.token_ids):
            raise ValueError(f"blocks emitted {emitted} tokens, the output has {len(self.token_ids)}")


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One prompt decoded by one arm (a method with its drafter and settings), one line of ``samples.jsonl``.

    ``arm``  name of the arm, unique in the run; ``autoregressive`` is the baseline.
    ``prompt_tokens``  after any cut; ``input_cut`` input tokens removed to fit.
    ``prediction``  what was scored: ``text`` after the task's extraction.
    ``scores``  per-sample quality by metric name; None where the metric has no value for this sample.
    ``peak_bytes``  the allocator's peak on CUDA during this sample, what the run's other arms hold included; None
    elsewhere.
    ``repeat``  counts the visits of the arm to the prompt, from 0; all write the same output.
    ``paired_with``  of a visit of the baseline, the only arm whose times it is compared with; None: all.
    ``contended``  who else was measuring on the same cores or devices meanwhile; None: nobody.
    ``measured_in``  the run that measured it, where that is another one (``pairing=shared``).
    ``resumed``  measured by another process than other arms of the same prompt: the run was killed between them.
    """

    run_id: str
    arm: str
    task: str
    example_id: str
    prompt_tokens: int
    input_cut: int
    prompt_sha: str
    text: str
    prediction: str
    references: tuple[str, ...]
    scores: Mapping[str, float | None]
    prefill_s: float
    decode_s: float
    peak_bytes: int | None
    generation: Generation
    repeat: int = 0
    paired_with: str | None = None
    contended: str | None = None
    measured_in: str | None = None
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a lossless arm's greedy output first differs from the baseline's, one line of ``divergences.jsonl``.

    ``position``  output tokens before it, equal in both.
    ``baseline_token``, ``arm_token``  None where that output had ended.
    ``gap``  the full verifier's largest logit there minus the second largest.
    ``distance``  the largest logit minus the lower one of the two tokens'; the baseline's is the largest itself.
    ``largest_logit``  by absolute value; ``bound`` is a multiple of it that rounding can explain.
    ``near_tie``  distance < bound; anything else is a fault.

    The four numbers are None where an output had ended, or a logit is not finite.
    """

    run_id: str
    task: str
    example_id: str
    arm: str
    position: int
    baseline_token: int | None
    arm_token: int | None
    gap: float | None
    distance: float | None
    largest_logit: float | None
    bound: float | None
    near_tie: bool

    def __post_init__(self) -> None:
        if self.baseline_token == self.arm_token:
            raise ValueError(f"no difference, got {self}")
        if self.near_tie != (self.distance is not None and self.bound is not None and self.distance < self.bound):
            raise ValueError(f"a near-tie is a distance below the bound, got {self}")


@dataclass(frozen=True, slots=True)
class FidelityRecord:
    """An output scored again by the full verifier, its text given, one line of ``fidelity.jsonl``.

    ``tokens``  of the output; ``greedy`` how many of them are the full verifier's likeliest after the text before.
    ``nll``  sum of -log of their probabilities, in nats; None where a logit is not finite.
    ``overshoot``  log of the draft probability minus log of the full verifier's, of each accepted draft in order; None
    where there is no drafter, or one whose law cannot be computed again.

    Probabilities are at the run's temperature (1 when greedy), before top-p and top-k; 1 for a draft from a table.
    """

    run_id: str
    task: str
    example_id: str
    arm: str
    tokens: int
    greedy: int
    nll: float | None
    overshoot: tuple[float, ...] | None

    def __post_init__(self) -> None:
        if not 0 <= self.greedy <= self.tokens:
            raise ValueError(f"want 0 <= greedy <= tokens, got {self}")
        if self.overshoot is not None and len(self.overshoot) > self.tokens:
            raise ValueError(f"more accepted drafts than tokens, got {self}")


@dataclass(frozen=True, slots=True)
class ArmRecord:
    """Identity of an arm: what a table says about it beside its numbers.

    ``lossless`` is declared by the method from its settings, and true only if its output law is the full verifier's.
    ``drafter`` and ``gate`` are None where the method has none; a two-tier rule of acceptance says in ``gate`` what it
    is set to, and for which law it is lossless if that is another one.
    """

    arm: str
    method: str
    drafter: str | None
    gate: str | None
    lossless: bool


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Identity of a run, ``run.json``. ``status`` is ``running``, ``finished`` or ``failed``.

    ``pairing``  how often and in which order arms decode a prompt, ``harness.pairing``.
    ``cell``  16 hex digits of everything that can change its numbers, and ``parts`` what was hashed, by name; None of a
    run from before there were cells. ``sweep`` is the sweep that it was first measured for.
    ``prompts``  of all tasks; ``pairing`` says how often each is decoded.
    ``resumed``  times that it was gone on with after it was killed or failed; ``split`` prompts whose arms were not all
    measured by one process, ``dropped`` half-written lines that this took away. ``error`` why it failed.
    """

    run_id: str
    schema: int
    created: str
    model: str
    temperature: float
    seed: int
    arms: tuple[ArmRecord, ...]
    data: Mapping[str, DataSource]
    prompts_sha: Mapping[str, str]
    task_metrics: Mapping[str, tuple[str, ...]]
    git_commit: str | None
    git_dirty: bool | None
    env: Mapping[str, str]
    status: str
    pairing: str = "once"
    cell: str | None = None
    parts: Mapping[str, str] = field(default_factory=dict)
    sweep: str | None = None
    prompts: int = 0
    resumed: int = 0
    split: int = 0
    dropped: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One number of a table, tidy: no compound keys.

    ``value`` is None where undefined (0/0) and prints as a dash. ``low`` and ``high`` bound a 95 % interval, None when
    there is none. ``source`` is ``ours`` or ``paper``. ``stderr`` is the standard error of a quality, else None.
    ``cell`` is the run's.
    """

    run_id: str
    arm: str
    model: str
    task: str
    metric: str
    unit: str
    higher_is_better: bool | None
    value: float | None
    low: float | None
    high: float | None
    n: int
    source: str
    stderr: float | None = None
    cell: str | None = None


def commit_text(commit: str | None, dirty: bool | None) -> str:
    """A commit as tables name it; ``none`` outside a checkout.

    >>> commit_text("0123456789abcdef", True)
    '0123456789ab (dirty)'
    """
    return "none" if commit is None else commit[:12] + (" (dirty)" if dirty else "")
