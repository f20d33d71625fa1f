"""The paper's tables, one spec each: its rows and columns, and which arms, tasks and metrics of ours stand for them.

A spec is data. The paper's values are found by its own names in ``results/paper/numbers.csv``, ours by the arms of
``conf/experiment/paper/<table>.yaml``. Nothing is matched by likeness of names.
"""

from dataclasses import dataclass, replace

QA = {"webq": ("WebQ", "web_questions"), "nq": ("NaturalQA", "nq_open"), "triviaqa": ("TriviaQA", "trivia_qa")}
TEXTS = {
    "xsum": ("XSum", "xsum", "rouge2", "ROUGE-2"),
    "cnndm": ("CNN/DM", "cnn_dailymail", "rouge2", "ROUGE-2"),
    "wmt14": ("WMT14 En-De", "wmt14_en_de", "bleu", "BLEU"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Drafter and full verifier of the paper; ``key`` as in ``numbers.csv``.

    ``model``  name in ``conf/model`` to run it with; ``full`` and ``drafter`` are that model's checkpoints.
    ``impossible``  why the paper's own pair cannot be run here; then ``model`` stands in its place, in rows of its own.
    """

    key: str
    label: str
    model: str
    full: str
    drafter: str
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of each block of rows.

    ``method``  the paper's name in ``numbers.csv``; None: a row of ours that the paper does not have.
    ``arms``  of ours; of several the mean.
    ``lossy``  by its definition: tables mark it also where it was not run.
    ``impossible``  why it cannot be run, whatever the models.
    """

    label: str
    method: str | None
    arms: tuple[str, ...]
    lossy: bool = False
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """``task`` and ``metric`` as in ``numbers.csv``, and ours.

    ``tasks``  of ours; of several the mean, where all but ``spare`` of them were run.
    ``scale``  what our value is multiplied by, for the paper's unit.
    ``temperature``  where the paper's columns differ in it; None: that of the block of rows.
    ``impossible``  why our runs cannot say it.
    """

    group: str
    label: str
    task: str
    metric: str
    tasks: tuple[str, ...]
    ours: str
    scale: float = 1.0
    digits: int = 2
    temperature: float | None = None
    spare: int = 0
    impossible: str = ""


@dataclass(frozen=True, slots=True)
class PaperTable:
    """``temperatures``: of the blocks of rows; empty where each column has its own. ``gamma`` of the experiment."""

    name: str
    title: str
    pairs: tuple[Pair, ...]
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    notes: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (1.0,)
    gamma: int = 5


GEMMA_9B = Pair("gemma2_2b_9b", "Gemma2 2B → 9B", "gemma2_9b", "google/gemma-2-9b", "google/gemma-2-2b")
GEMMA_27B = Pair("gemma2_2b_27b", "Gemma2 2B → 27B", "gemma2_27b", "google/gemma-2-27b", "google/gemma-2-2b")
LLAMA_13B = Pair(
    "llama2_7b_13b", "LLaMA2 7B → 13B", "llama2_13b", "meta-llama/Llama-2-13b-hf", "meta-llama/Llama-2-7b-hf"
)
LLAMA_70B = Pair(
    "llama2_7b_70b", "LLaMA2 7B → 70B", "llama2_70b", "meta-llama/Llama-2-70b-hf", "meta-llama/Llama-2-7b-hf"
)
NO_QWEN = "first-generation Qwen is not supported; Qwen2.5 stands in its place, in rows of its own"
NO_T5 = "encoder-decoder models are not supported; Gemma2 stands in its place, in rows of its own"
QWEN_14B = Pair("qwen_7b_14b", "Qwen 7B → 14B", "qwen2_5_14b", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-7B", NO_QWEN)
QWEN_72B = Pair("qwen_7b_72b", "Qwen 7B → 72B", "qwen2_5_72b", "Qwen/Qwen2.5-72B", "Qwen/Qwen2.5-7B", NO_QWEN)
T5_LARGE = replace(GEMMA_9B, key="t5_small_large", label="T5 S → L", impossible=NO_T5)
T5_XL = replace(GEMMA_27B, key="t5_small_xl", label="T5 S → XL", impossible=NO_T5)
GEMMAS = (GEMMA_9B, GEMMA_27B)
T5S = (T5_LARGE, T5_XL)

SD = Row("SD", "speculative", ("speculative",))
BILD = Row("BiLD", "bild", ("bild",), lossy=True)
CASCADE_SD = Row("Cascade SD", "cascade_sd", ("cascade_sd",))
FASTER = Row("Faster Cascades", "faster_cascades", ("cascade_token_v3",), lossy=True)
SWIFT = Row("SWIFT", "swift", ("swift",))
CLASP = Row("CLaSp", "clasp", ("clasp",))
VIA_SD = Row("VIA-SD", "via_sd", ("via_sd_paper",), lossy=True)
METHODS = (SD, BILD, CASCADE_SD, FASTER, SWIFT, CLASP, VIA_SD)

EXACT = "Accuracy of the paper is set beside our exact match."
SPEED = "Speed of the paper is set beside our decode speedup (prefill left out); it does not say which it is."
REJECTION = (
    "Rejection of the paper is set beside our reject_rate (examined drafts not kept); it does not define its own."
)
READINGS = "VIA-SD is our reading of the paper (conf/method/via_sd_paper.yaml)."
FASTER_READING = "Faster Cascades is its rule TokenV3 with alpha 0.5: reading ours."
UNSTATED = "The paper states no temperature for LLaMA2 and Qwen; ours is 1, as for Gemma2."


def accuracy(group: str, task: str, ours: str) -> Column:
    return Column(group, "accuracy", task, "accuracy", (ours,), "exact_match", scale=0.01)


def rejection(group: str, task: str, ours: str, at: float | None = None) -> Column:
    return Column(group, "rejection", task, "reject_rate", (ours,), "reject_rate", temperature=at)


def speed(group: str, task: str, ours: str, at: float | None = None) -> Column:
    return Column(group, "speed", task, "speedup", (ours,), "speedup_decode", temperature=at)


def texts(**temperatures: float) -> tuple[Column, ...]:
    """Quality, rejection and speed of each set, at a temperature of its own where it has one."""
    found: list[Column] = []
    for task, (group, ours, metric, label) in TEXTS.items():
        at = temperatures.get(task)
        found.append(Column(group, label, task, metric, (ours,), metric, temperature=at))
        found += [rejection(group, task, ours, at), speed(group, task, ours, at)]
    return tuple(found)


TABLE1 = PaperTable(
    "table1",
    "Two to five tiers",
    GEMMAS,
    tuple(Row(f"{count}-tier", f"tiers_{count}", (f"tiers_{count}",), lossy=count > 2) for count in (2, 3, 4, 5)),
    tuple(make(group, task, ours) for task, (group, ours) in QA.items() for make in (rejection, speed)),
    ("The fourth and fifth tier skip 30 and 20 % of layers: reading ours.", REJECTION, SPEED, READINGS),
)
TABLE3 = PaperTable(
    "table3",
    "Summarization at temperature 1, translation at 0",
    T5S,
    (SD, CASCADE_SD, FASTER, VIA_SD),
    texts(xsum=1.0, cnndm=1.0, wmt14=0.0),
    (REJECTION, SPEED, FASTER_READING, READINGS, "The paper's WMT14 rows differ from those of its Table 9."),
    temperatures=(),
)
TABLE4 = PaperTable(
    "table4",
    "Time of the DIMR search",
    (GEMMA_9B, GEMMA_27B, LLAMA_13B, LLAMA_70B, QWEN_14B, QWEN_72B),
    (Row("DIMR", "dimr", ("dimr",)),),
    (
        Column("", "minutes", "", "search_minutes", ("",), "search_minutes", digits=1),
        Column(
            *("", "GPU hours", "", "search_gpu_hours", ("",), "search_gpu_hours"),
            impossible="the card of a mask does not say which devices its search ran on",
        ),
    ),
    (
        "Ours: search_s of the mask's card, all proposals and scores at 45 % of layers and cache mode shared; writing "
        "the calibration text is not in it.",
        "Constants of the search are those of SWIFT, for the paper does not give its own.",
    ),
    temperatures=(),
)
TABLE5 = PaperTable(
    "table5",
    "Where the slim verifier comes from",
    (GEMMA_27B,),
    (
        replace(SD, label="None: two-layer SD"),
        Row(
            "Independent 13B",
            "independent_intermediate",
            (),
            lossy=True,
            impossible="Gemma2 has no model of 13B; 9B stands in its place, in a row of its own",
        ),
        Row("Independent 9B, in place of 13B", None, ("via_sd_independent",), lossy=True),
        Row("Random skip", "random_mask", ("via_sd_random",), lossy=True),
        Row("DIMR", "dimr_mask", ("via_sd_paper",), lossy=True),
    ),
    (
        Column(
            *("WebQ", "memory", "webq", "peak_memory_ratio", ("web_questions",), "peak_memory_ratio"),
            impossible="arms of a run share weights, so that its peak is that of all of them",
        ),
        speed("WebQ", "webq", "web_questions"),
        accuracy("WebQ", "webq", "web_questions"),
    ),
    (EXACT, SPEED, READINGS),
)
TABLE6 = PaperTable(
    "table6",
    "Layers skipped at random",
    GEMMAS,
    (
        Row("Random skip", "random_mask", ("via_sd_random_0", "via_sd_random_1", "via_sd_random_2"), lossy=True),
        Row("DIMR, of the same run", None, ("via_sd_paper",), lossy=True),
    ),
    tuple(make(group, task, ours) for task, (group, ours) in QA.items() for make in (accuracy, speed)),
    ("Ours is the mean of three random masks; the paper has one.", EXACT, SPEED, READINGS),
)
TABLE7 = PaperTable(
    "table7",
    "Thresholds and skip ratio",
    GEMMAS,
    tuple(
        Row(
            f"alpha1 {alpha1}, alpha2 {alpha2}, skip {skip} %",
            f"via_sd_alpha1={alpha1}_alpha2={alpha2}_skip={skip}",
            (f"strictness_{alpha1 * 100:.0f}_{alpha2 * 100:.0f}_skip{skip}",),
            lossy=True,
        )
        for alpha1, alpha2, skip in ((0.4, 0.2, 35), (0.5, 0.3, 45), (0.6, 0.4, 55))
    ),
    (
        Column(
            *("mean of sets", "speed", "mean", "speedup"),
            ("gsm8k", "squad_v2", "web_questions", "nq_open", "trivia_qa", "mbpp"),
            "speedup_decode",
            spare=1,
        ),
    ),
    (
        "Ours is the mean over the sets that its run lists; the paper's is over six, of which MBPP runs only "
        "where that is permitted.",
        SPEED,
        "Thresholds as strictness: reading ours.",
    ),
)
TABLE8 = PaperTable(
    "table8",
    "Every method on three sets of questions (contains Table 2)",
    (GEMMA_9B, GEMMA_27B, LLAMA_13B, LLAMA_70B, QWEN_14B, QWEN_72B),
    METHODS,
    tuple(make(group, task, ours) for task, (group, ours) in QA.items() for make in (accuracy, rejection, speed)),
    (
        *(EXACT, REJECTION, SPEED, FASTER_READING, READINGS, UNSTATED),
        "The paper's speeds of Gemma2 are those of gamma 4 in its Fig. 9; ours are of gamma 5, which it states.",
    ),
)
TABLE9 = PaperTable(
    "table9",
    "Every method on summarization and translation",
    T5S,
    METHODS,
    texts(),
    (REJECTION, SPEED, FASTER_READING, READINGS),
    temperatures=(0.0, 1.0),
)

TABLES = {table.name: table for table in (TABLE1, TABLE3, TABLE4, TABLE5, TABLE6, TABLE7, TABLE8, TABLE9)}
"""By the name of their experiment, in the paper's order."""
