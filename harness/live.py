"""What a bench run shows while it decodes. Counting is done between samples, when no clock runs."""

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from harness.records import SampleRecord


def columns() -> tuple[ProgressColumn, ...]:
    """Of a progress bar whose task has the field ``rates``."""
    bar = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    return (*bar, TextColumn("{task.fields[rates]}"), TimeElapsedColumn(), TimeRemainingColumn())


class Tally:
    """Rates over the samples so far: output tokens per second of decoding, and ``mean_accept_length`` and
    ``reject_rate`` of the arms that draft. ``prefix`` stands before them.
    """

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.tokens = self.blocks = self.emitted = self.examined = self.kept = 0
        self.decode_s = 0.0

    def add(self, sample: SampleRecord) -> str:
        """Count a sample; the text that then stands."""
        self.tokens += len(sample.generation.token_ids)
        self.decode_s += sample.decode_s
        blocks = sample.generation.blocks
        if any(block.asked for block in blocks):
            self.blocks += len(blocks)
            self.emitted += sum(block.emitted for block in blocks)
            self.examined += sum(len(block.routes) for block in blocks)
            self.kept += sum(block.kept for block in blocks)
        return self.text

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.decode_s if self.decode_s else None

    @property
    def mean_accept_length(self) -> float | None:
        return self.emitted / self.blocks if self.blocks else None

    @property
    def reject_rate(self) -> float | None:
        return 1 - self.kept / self.examined if self.examined else None

    @property
    def text(self) -> str:
        known = {
            "{:.1f} tokens/s": self.tokens_per_s,
            "length {:.2f}": self.mean_accept_length,
            "reject {:.2f}": self.reject_rate,
        }
        rates = [form.format(rate) for form, rate in known.items() if rate is not None]
        return ", ".join([self.prefix, *rates] if self.prefix else rates)
