"""SPEED-Bench of NVIDIA (arXiv 2604.09557): 11 domains, or inputs of 1k to 32k tokens in three tiers of entropy."""

from typing import Any

from harness.errors import unknown
from tasks.mixed import Mixed
from tasks.source import Dataset

PARTS = ("qualitative", *(f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k")))


class SpeedBench(Mixed):
    """A speed benchmark without references; quality is a dash, and agreement with greedy stands beside the speed.

    ``part``  the hub's configuration: ``qualitative``, or ``throughput_1k`` to ``throughput_32k``, whose inputs have
    about that many tokens: raise ``max_input_tokens`` with it. Local files are ``speed_bench_<part>_test.jsonl``.

    About half of the public rows hold a mark in place of a text that its owner does not let NVIDIA pass on; NVIDIA's
    own script puts them in. They are left out, so that numbers on the rest are no published SPEED-Bench scores.
    """

    name = "speed_bench"
    columns = ("category", "turns")
    hidden = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    remedy = "fill it in with NVIDIA's prepare_data.py, and take the result with data_dir=PATH"

    def __init__(self, *, part: str = "qualitative", **settings: Any) -> None:
        """``part`` is one of ``PARTS``. Other settings as in ``Mixed``."""
        if part not in PARTS:
            raise unknown("part of speed_bench", part, PARTS)
        super().__init__(**settings)
        self.part = part
        self.dataset = Dataset(
            *("nvidia/SPEED-Bench", part, f"speed_bench_{part}", f"speed_bench-{part}", "speed_bench"),
            calibration=(),
            shots=(),
        )
