"""What a bench run with this config would miss: ``python -m harness job=preflight``. Runs nothing."""

import yaml
from rich.console import Console

from harness.config import check_calls
from harness.preflight import CALLED, missing_packages, require


def preflight(config: str) -> None:
    """Check ``config``, a composed config as YAML, and say that nothing is missing.

    Raises:
        UserError: something is missing; each on a line of its own.
    """
    settings = yaml.safe_load(config)
    if not missing_packages(settings):
        called = {key: settings[key] for key in CALLED}
        check_calls({"job": called}, {"job": called})
    require([settings])
    arms, tasks = len(settings["methods"]), len(settings["tasks"])
    Console().print(f"nothing is missing: {arms} arms, {tasks} tasks", highlight=False)
