"""Slim verifiers: where the tier between drafter and full verifier comes from, and what its cache holds.

``cache`` is ``shared``: the tier reads the full verifier's committed entries and keeps a provisional tail behind them,
so that it processes no token twice, though its keys and values are another model's. Or ``own``: it keeps the keys and
values that its own layers make of every committed token, for which it processes the prompt while prefilling, and later
whatever was committed without it. The paper does not say which (methods: reading, ours; both are here).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature

from harness.drafters.small_lm import beside
from harness.drafters.weights import drafter_folder, folder_name
from harness.errors import UserError, unknown
from harness.model.load import Model
from harness.model.slim import (
    CACHES,
    Mask,
    evenly_spaced,
    first_layers,
    random_layers,
    random_sublayers,
    read_mask,
    searched_cache,
    searched_mask,
)
from harness.model.sublayers import skipping
from harness.model.tiers import Tier, Tiers


@dataclass(frozen=True, slots=True)
class Slim:
    """A slim verifier bound to its tiers. ``source`` says where it came from, ``layers`` what it keeps.

    ``skip_ratio``: share of the full verifier that it skips, None of another model. ``searched``: the cache mode in
    which its mask was searched, None where nobody says.
    """

    tier: Tier
    source: str
    layers: str
    cache: str
    skip_ratio: float | None = None
    searched: str | None = None

    @property
    def cache_text(self) -> str:
        """``cache`` as tables have it: a mask searched in the other mode is said to be one."""
        other = self.searched not in (None, self.cache)
        return f"{self.cache} (mask searched in {self.searched})" if other else self.cache


def masked_tier(tiers: Tiers, mask: Mask, cache: str, name: str = "slim") -> Tier:
    """A tier that runs what ``mask`` keeps of the full verifier.

    Raises:
        UserError: no such cache mode.
    """
    if cache not in CACHES:
        raise unknown("slim cache", cache, CACHES)
    model = skipping(tiers.model, mask)
    if cache == "shared":
        return tiers.provisional(name, mask.layers, model)
    return tiers.separate(name, mask.layers, model, mask.attending)


def bound(tiers: Tiers, mask: Mask, source: str, cache: str, name: str = "slim", searched: str | None = None) -> Slim:
    return Slim(masked_tier(tiers, mask, cache, name), source, mask.text, cache, mask.skip_ratio, searched)


def masked(
    tiers: Tiers,
    model: Model,
    mask: str | Sequence[int] | None = None,
    cache: str = "shared",
    skip_ratio: float | None = None,
) -> Slim:
    """The layers of ``mask``, a file of ``job=search`` or a list of kept layers; None: ``model.slim_mask``.

    ``skip_ratio`` instead of both: the file that ``job=search`` makes for this model, ratio and cache mode.

    Raises:
        UserError: no mask, two of them, no such file, or a mask for another depth.
    """
    if skip_ratio is not None:
        if mask is not None:
            raise UserError(f"slim.mask={mask} and slim.skip_ratio={skip_ratio} both choose a mask: set one to null.")
        own = model.folder is None or model.slug == "embedded"
        chosen = f"model={model.slug}" if own else f"model.full={model.folder}"
        mask = searched_mask(model.slug, skip_ratio, cache, chosen)
    if mask is not None:
        read = read_mask(mask, model.transformer.spec.layers)
        return bound(tiers, read, str(mask), cache, searched=searched_cache(mask))
    if model.slim_mask is None:
        raise UserError(
            "a slim verifier is needed and the model has no layer mask: set model.slim_mask to a file written by "
            "job=search or to a list of kept layers, or choose another slim=NAME."
        )
    name = model.mask_name or "model.slim_mask"
    return bound(tiers, model.slim_mask, name, cache, searched=searched_cache(name))


def in_cache(
    tiers: Tiers, model: Model, slim: Callable[..., Slim | tuple[Slim, ...]], cache: str
) -> Slim | tuple[Slim, ...]:
    """The slim verifier, or several, of ``slim`` in cache mode ``cache``, whatever mode it says itself.

    Raises:
        UserError: ``slim`` is another model, which has its own cache by nature.
    """
    if "cache" not in signature(slim).parameters:
        raise UserError(
            f"cache mode {cache} is asked of a slim verifier that is a model of its own and has no choice: "
            "choose slim=mask or another that runs the full verifier's layers."
        )
    return slim(tiers, model, cache=cache)


def several(
    tiers: Tiers, model: Model, masks: Sequence[str | Sequence[int]], cache: str = "shared"
) -> tuple[Slim, ...]:
    """Several slim verifiers, each asked what the one before it escalates (2 to 5 tiers in the paper's Table 1).

    Raises:
        UserError: no mask, one that cannot be read, or one that skips no less than a mask before it.
    """
    read = [read_mask(mask, model.transformer.spec.layers) for mask in masks]
    ratios = [mask.skip_ratio for mask in read]
    if not read or ratios != sorted(set(ratios), reverse=True):
        raise UserError(
            f"slim.masks skip {', '.join(f'{ratio:.2f}' for ratio in ratios) or 'nothing'}: want one mask at least, by "
            "decreasing skip ratio, since a draft is escalated to a verifier that skips less."
        )
    names = ("slim", *(f"slim{number}" for number in range(2, len(read) + 1)))
    return tuple(
        bound(tiers, mask, str(given), cache, name, searched_cache(given))
        for name, given, mask in zip(names, masks, read, strict=True)
    )


def at_random(tiers: Tiers, model: Model, skip_ratio: float = 0.3, seed: int = 0, cache: str = "shared") -> Slim:
    """Inner layers skipped at random, the same ones for the same seed (the paper's random-skip ablation, Table 6)."""
    mask = random_layers(model.transformer.spec.layers, skip_ratio, seed)
    return bound(tiers, mask, f"random, skip {skip_ratio:g}, seed {seed}", cache)


def even(tiers: Tiers, model: Model, skip_ratio: float = 0.3, cache: str = "shared") -> Slim:
    """Evenly spaced layers skipped."""
    mask = evenly_spaced(model.transformer.spec.layers, skip_ratio)
    return bound(tiers, mask, f"evenly spaced, skip {skip_ratio:g}", cache)


def prefix(tiers: Tiers, model: Model, skip_ratio: float = 0.3, cache: str = "shared") -> Slim:
    """The first layers, through the full verifier's norm and head (early exit, as LayerSkip, arXiv 2404.16710).

    These layers' entries are the full verifier's own, so both cache modes score alike.
    """
    mask = first_layers(model.transformer.spec.layers, skip_ratio)
    return bound(tiers, mask, f"prefix, skip {skip_ratio:g}", cache)


def sublayers(tiers: Tiers, model: Model, skip_ratio: float = 0.3, seed: int = 0, cache: str = "shared") -> Slim:
    """Attention and MLP sublayers skipped apart, at random (SWIFT's units; searched ones are a mask file)."""
    mask = random_sublayers(model.transformer.spec.layers, skip_ratio, seed)
    return bound(tiers, mask, f"random sublayers, skip {skip_ratio:g}, seed {seed}", cache)


def checkpoint(tiers: Tiers, model: Model, path: str, dtype: str | None = None) -> Slim:
    """Another model with the same tokenizer, of a size between drafter and full verifier (the paper's Table 5).

    Its cache is its own by nature. ``dtype`` None: the full verifier's.

    Raises:
        UserError: no such folder, or another tokenizer.
    """
    folder = drafter_folder(path, "slim.path")
    other = beside(model, folder, dtype or str(model.transformer.dtype).removeprefix("torch."), "slim verifier")
    tier = tiers.independent("slim", other)
    name = folder_name(folder)
    return Slim(tier, f"checkpoint {name}", f"all {other.spec.layers} of {name}", "own")


def only(made: Slim | Sequence[Slim], method: str) -> Slim:
    """The slim verifier of a method that has one.

    Raises:
        UserError: ``slim=several`` made more.
    """
    if not isinstance(made, Slim):
        raise UserError(f"{method} takes one slim verifier, slim=several makes {len(made)}: choose another slim=NAME.")
    return made


def slims_of(method: object) -> Sequence[Slim]:
    """The slim verifiers of a method, else the one that drafts for it."""
    found: Sequence[Slim] = getattr(method, "slim_verifiers", ())
    return found or getattr(getattr(method, "drafter", None), "slim_verifiers", ())


def slim_notes(methods: Mapping[str, object]) -> list[str]:
    """A line for each arm and mask that was searched in another cache mode than it runs in."""
    return [
        f"{name}: {one.source} was searched in cache mode {one.searched} and runs in {one.cache}: "
        f"job=search job.cache={one.cache} searches one for it"
        for name, method in methods.items()
        for one in slims_of(method)
        if one.cache_text != one.cache
    ]


def slim_facts(model: Model, methods: Mapping[str, object]) -> dict[str, str]:
    """What a run's record says of the slim verifiers of ``methods``, by arm where they differ.

    Where none has one it says what the model has.
    """
    found: dict[str, tuple[str, ...]] = {}
    for name, method in methods.items():
        if made := slims_of(method):
            facts_of = [(one.source, one.layers, one.cache_text) for one in made]
            found[name] = tuple(", then ".join(part) for part in zip(*facts_of, strict=True))
    if not found:
        found["model"] = (model.mask_name or "none", model.slim_mask.text if model.slim_mask else "none", "shared")
    facts = {}
    for key, values in zip(("slim_mask", "slim_layers", "slim_cache"), zip(*found.values(), strict=True), strict=True):
        named = "; ".join(f"{name}: {value}" for name, value in zip(found, values, strict=True))
        facts[key] = values[0] if len(set(values)) == 1 else named
    return facts
